"""Seconds of an engine's steps, measured, and the cost model of a simulation that follows from them.

The one module that knows both sides: the engine is told of no simulation, and the simulation of no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cbjax.config import ContinuousBatchingConfig, GenerationConfig
from cbjax.progress import progress
from cbjax.simulate.cost import LinearCost, StepWork
from cbjax.simulate.fit import MeasuredStep, fit_cost
from cbjax.step_record import StepRecord

if TYPE_CHECKING:
    from cbjax.ladder import Ladder
    from cbjax.mixin import ContinuousMixin

# A job's decode steps. Its prompts come to no more tokens than so many full steps, so that prefills stay few.
_DECODES = 8
_FULL_STEPS = 2


@contextmanager
def measure_steps(lm: ContinuousMixin) -> Iterator[list[MeasuredStep]]:
    """Measures the steps of all that runs in the block; the list is complete once the block is left.

    A step's seconds go from the moment in which it has been handed to the device to the same moment of the next: the
    device's work, reading the answers and applying them, then scheduling, building and handing over the next step. So
    their sum is the time of a run, with nothing left out. A call's last step has no next one and is not in the list,
    nor is the time between calls.

    Steps are measured as they run one after another, each read before the next is scheduled.
    """
    steps: list[MeasuredStep] = []
    records: list[tuple[StepWork, float, frozenset[int]]] = []

    def observe(record: StepRecord) -> None:
        work = StepWork.of(record.plan, record.bucket)
        records.append((work, record.dispatched, frozenset(record.request_ids)))

    lm.observers.append(observe)
    try:
        yield steps
    finally:
        lm.observers.remove(observe)
        for (work, began, alive), (_, ended, alive_then) in pairwise(records):
            if alive & alive_then:  # else the engine had nothing to do in between
                steps.append(MeasuredStep(work, ended - began))


def measure_cost(
    lm: ContinuousMixin,
    config: ContinuousBatchingConfig | None = None,
    *,
    repeats: int = 2,
    progress_bar: bool = False,
) -> LinearCost:
    """Measures what the steps of a model cost on this machine, in every bucket of its ladder.

    Random prompts of several lengths run in batches of several sizes, which fill each bucket wholly and in part; EOS
    ends nobody. Moved blocks are measured as far as `config` has a pool so small that requests lose theirs. Other
    processes on the machine make the seconds theirs, too: measure when it is quiet.

    Args:
      config: of the engine to be simulated; None: the model's own, at first the defaults.
      repeats: of everything.

    Raises:
      As `generate_batch`; ValueError: `repeats` is not at least 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1; got {repeats}")
    config = lm.continuous_batching_config if config is None else config
    rng = np.random.default_rng(0)
    _generate(lm, config, [_prompt(rng, lm, min(128, lm.max_positions - _DECODES))], new_tokens=1)
    session = lm.session
    assert session is not None
    largest = session.resolved.scheduler.max_request_tokens
    jobs = [sizes for sizes in _jobs(session.resolved.ladder, min(lm.max_positions, largest) - _DECODES)] * repeats
    # The largest first: the store is made for it, and serves the others.
    jobs.sort(key=lambda sizes: (sum(sizes), len(sizes)), reverse=True)
    steps: list[MeasuredStep] = []
    for sizes in progress(jobs, show=progress_bar, desc="measuring", unit="job"):
        prompts = [_prompt(rng, lm, size) for size in sizes]
        with measure_steps(lm) as measured:
            _generate(lm, config, prompts, new_tokens=_DECODES)
        steps += measured
    return fit_cost(steps)


def _jobs(ladder: Ladder, longest: int) -> Iterator[list[int]]:
    """Prompt lengths of each batch; no prompt is longer than `longest` tokens."""
    most = ladder.max_batch_tokens
    rows = sorted({bucket.rows for bucket in ladder.buckets})
    for below, limit in pairwise([0, *rows]):
        for count in sorted({below + (limit - below + 1) // 2, limit}):
            for total in (most // 8, most * _FULL_STEPS):
                yield [max(1, min(longest, total // count))] * count
    for below, bucket in pairwise([None, *ladder.mixed]):
        least = below.tokens if below else 0
        for total in sorted({least + (bucket.tokens - least + 1) // 2, min(bucket.tokens, most)}):
            # One prompt, or as many as it takes.
            yield _split(total, longest)


def _split(total: int, longest: int) -> list[int]:
    parts = -(-total // longest)
    return [total // parts] * parts


def _prompt(rng: np.random.Generator, lm: ContinuousMixin, size: int) -> list[int]:
    return rng.integers(0, lm.vocab_size, size).tolist()


def _generate(
    lm: ContinuousMixin, config: ContinuousBatchingConfig, prompts: Sequence[list[int]], *, new_tokens: int
) -> None:
    lm.generate_batch(prompts, GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, do_sample=False), config)
