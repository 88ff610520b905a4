"""Random runs of the real engine on the history-hash device, recorded: tight pools, and all that can happen in one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from engines import GREEDY, assert_clean, expected
from machines import DEPTHS, POLICIES, VOCAB_SIZE, make_device, random_config, random_prompt, random_size

from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.pace import Pace
from cbjax.recording import Journal
from cbjax.requests import RequestState, RequestStatus
from cbjax.sampling import NUM_WORDS
from cbjax.scheduler import EVICTION_MAPPING
from cbjax.step_record import StepRecord
from cbjax.tracing import StepListener


@dataclass(slots=True)
class Run:
    """Attributes:
    steps: as the engine told them.
    requests: all that were submitted, and what ends each.
    """

    engine: Engine
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[tuple[RequestState, tuple[int, ...]]] = field(default_factory=list)

    def count(self, what: str) -> int:
        """Entries of a plan's field, or its block copies, over all steps."""
        return sum(len(getattr(step.plan, what)) for step in self.steps)

    def num_ended(self, reason: str) -> int:
        return sum(request.finish_reason == reason for request, _ in self.requests)


def random_engine(rng: random.Random, policy: str) -> Engine:
    """A few requests overfill its pool; with or without windows, sharing, host memory, and steps in flight."""
    config = random_config(
        rng,
        policy,
        rng.choice([(None,), (None,), (None, 6)]),
        num_words=NUM_WORDS,
        shares_blocks=rng.random() < 0.7,
        eviction=rng.choice(list(EVICTION_MAPPING.values())),
        host_blocks=rng.choice([0, 4, 100, 100]),
    )
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    depth = rng.choice(DEPTHS)
    return Engine(make_device(config), config, ladder, vocab_size=VOCAB_SIZE, max_positions=4096, depth=depth)


def _submit(rng: random.Random, run: Run) -> None:
    """One request, or several with the same prompt."""
    config = run.engine.state.config
    length, new = random_size(rng, config)
    prompt, eos = random_prompt(rng, length), tuple(range(rng.choice([0, 0, 30])))
    first = None
    for _ in range(rng.choice([1, 1, 2, 4])):
        request = run.engine.submit(
            f"r{len(run.requests)}", prompt, max_new_tokens=new, eos_token_ids=eos, sampling=GREEDY, fork_of=first
        )
        run.requests.append((request, eos))
        first = first or request


def random_run(seed: int, journal: Journal | None, listener: StepListener | None = None) -> Run:
    """Requests come while others run, in windows or not, are forked and cancelled; weights change, some abort all.

    Whatever ended by itself has the tokens of its solo run.
    """
    rng = random.Random(seed)
    run = Run(random_engine(rng, POLICIES[seed % 2]))
    engine = run.engine
    engine.pace = Pace(max_window=(1, 3, 16)[seed // 2 % 3], max_seconds=math.inf, step_seconds=0.0)
    engine.observers = [run.steps.append]
    if listener is not None:
        engine.tracer.add(listener)
    engine.scheduler.record(journal)
    for _ in range(rng.randint(4, 8)):
        _submit(rng, run)
        for _ in range(rng.choice([0, 0, 0, 2, 6])):
            engine.step()
        if rng.random() < 0.3:
            engine.cancel(rng.choice(run.requests)[0].request_id)
        if rng.random() < 0.1:
            engine.renew()
        if rng.random() < 0.05:
            engine.abort(RequestStatus.CANCELLED, "cancelled", "interrupted")
    while not engine.is_idle:
        engine.step()
    assert_clean(engine)
    for request, eos in run.requests:
        if request.finish_reason in ("stop", "length"):
            assert request.generated_tokens == expected(request, eos)
    return run
