"""Seconds of an engine's steps, measured, and the cost model of a simulation that follows from them.

The one module that knows both sides: the engine is told of no simulation, and the simulation of no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from cbjax.config import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.progress import progress
from cbjax.simulate.cost import LinearCost, StepWork
from cbjax.simulate.fit import MeasuredStep, fit_cost
from cbjax.step_record import StepRecord
from cbjax.strict import check_int

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

    A run in which steps overlap (`use_async_batching`) tells of the pace of its steps, not of what each takes.
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
    workload_hints: WorkloadHints | None = None,
    *,
    repeats: int = 2,
    progress_bar: bool = False,
) -> LinearCost:
    """Measures what the steps of a model cost on this machine, in every bucket of its ladder.

    Random prompts of several lengths run in batches of several sizes, which fill each bucket wholly and in part; EOS
    ends nobody. Moved blocks are measured only where requests lose theirs in a pool that small. What other processes
    take of the machine is measured, too: do it when it is quiet. Steps run one after another, `use_async_batching` or
    not, as they do in a simulation.

    Args:
      config, workload_hints: of the engine to be simulated, as in `ContinuousMixin.init_continuous_batching`.
      repeats: of everything.

    Raises:
      As `continuous_batching_context_manager`; ValueError: `repeats` is not at least 1.
    """
    check_int("repeats", repeats, minimum=1)
    generation = GenerationConfig(max_new_tokens=_DECODES, do_sample=False, eos_token_id=-1)
    config = replace(config or lm.continuous_batching_config, use_async_batching=False)
    rng = np.random.default_rng(0)
    with lm.continuous_batching_context_manager(generation, config, workload_hints) as manager:
        assert lm.session is not None
        resolved = lm.session.resolved
        longest = min(lm.max_positions, resolved.scheduler.max_request_tokens) - _DECODES
        if longest < 1:
            raise ValueError(
                f"a request must have room for {_DECODES} new tokens beside its prompt; it has {longest + _DECODES} "
                "tokens in all: raise num_blocks or max_blocks_per_request"
            )
        with measure_steps(lm) as steps:
            jobs = list(_jobs(resolved.ladder, longest)) * repeats
            for sizes in progress(jobs, show=progress_bar, desc="measuring", unit="job"):
                names = manager.add_requests([rng.integers(0, lm.vocab_size, size).tolist() for size in sizes])
                for name in names:
                    manager.get_result(name)
    return fit_cost(steps)


def _jobs(ladder: Ladder, longest: int) -> Iterator[list[int]]:
    """Prompt lengths of each batch; no prompt is longer than `longest` tokens."""
    most = ladder.max_batch_tokens
    rows = sorted({bucket.rows for bucket in ladder.buckets})
    for below, limit in pairwise([0, *rows]):
        for count in sorted({below + (limit - below + 1) // 2, limit}):
            for total in (most // 8, most * _FULL_STEPS):
                yield [max(1, min(longest, total // count))] * count
    for below, limit in pairwise([0, *(bucket.tokens for bucket in ladder.mixed)]):
        for total in sorted({below + (limit - below + 1) // 2, min(limit, most)}):
            # One prompt, or as many as it takes.
            yield _split(total, longest)


def _split(total: int, longest: int) -> list[int]:
    parts = -(-total // longest)
    return [total // parts] * parts
