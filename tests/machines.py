"""Drivers shared by the scheduler's tests, all over the history-hash device.

`Loop` is the engine's loop with nothing around it: every state it comes to is checked, every token is compared with the
request's solo run, and it can be stopped between any two transitions.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from cbjax.descriptor import build, unpad
from cbjax.ladder import make_ladder
from cbjax.sampling import SamplingParams
from cbjax.scheduler import (
    Batch,
    Ended,
    Request,
    SchedulerConfig,
    StepOutputs,
    StepPlan,
    add,
    cancel,
    check,
    initial_state,
    schedule,
    scheduler_named,
    update,
)
from cbjax.testing import HistoryHashDevice, solo_run

VOCAB_SIZE = 997
POLICIES = ("fifo", "prefill_first")
DEPTHS = (0, 1, 2, 3)
# One window per layer group.
type Windows = tuple[int | None, ...]
GREEDY = SamplingParams()


def make_config(*, policy: str = "fifo", max_blocks_per_request: int | None = None, **changes) -> SchedulerConfig:
    """A small config without a margin; the block table is as wide as the pool unless told."""
    settings = {
        "num_blocks": 64,
        "block_size": 4,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 8,
        "safety_margin": 0.0,
        "num_words": 2,
    } | changes
    columns = settings["num_blocks"] if max_blocks_per_request is None else max_blocks_per_request
    return SchedulerConfig(policy=scheduler_named(policy), max_blocks_per_request=columns, **settings)


def make_device(config: SchedulerConfig) -> HistoryHashDevice:
    """The history-hash device that such a scheduler expects."""
    return HistoryHashDevice(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_slots=config.max_requests_per_batch,
        max_blocks=config.max_blocks_per_request,
        vocab_size=VOCAB_SIZE,
        windows=config.windows,
    )


def make_prompt(length: int, seed: int = 0) -> np.ndarray:
    """i32[length], other ids for every seed."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB_SIZE, length, dtype=np.int32)


def make_request(
    uid: int, prompt: int | Sequence[int] | np.ndarray, max_new_tokens: int, eos: tuple[int, ...] = ()
) -> Request:
    """A request for the scheduler; `prompt` is its ids or only their number."""
    ids = make_prompt(prompt, uid) if isinstance(prompt, int) else np.array(prompt, np.int32)
    words = np.array([uid + 1, 7], np.uint32)
    return Request(uid=uid, prompt=ids, max_new_tokens=max_new_tokens, eos_token_ids=eos, words=words)


def solo(request: Request) -> list[int]:
    """The tokens the request must get, whatever else happens."""
    return solo_run(request.prompt, request.words, request.max_new_tokens, request.eos_token_ids, vocab_size=VOCAB_SIZE)


def make_batch(counts: list[int], seed: int = 0, window: int = 1) -> Batch:
    """A batch with rows of these lengths, as many steps, and arbitrary values everywhere else."""
    rng, rows = np.random.default_rng(seed), len(counts)

    def ints(size: int, low: int = 0, high: int = 1000) -> np.ndarray:
        return rng.integers(low, high, size, dtype=np.int32)

    return Batch(
        uid=ints(rows),
        incarnation=ints(rows),
        slot=ints(rows, high=40),
        start=ints(rows),
        count=np.array(counts, np.int32),
        carried=rng.random(rows) < 0.5,
        emits=rng.random(rows) < 0.5,
        output_index=ints(rows),
        draws=ints(rows, high=window + 1),
        eos=ints(4 * rows, low=-1).reshape(4, rows),
        words=rng.integers(0, 2**32, (2, rows), dtype=np.uint32),
        tokens=ints(sum(counts), low=1),
        window=window,
    )


def constant_answers(plan: StepPlan, token: int = 0) -> StepOutputs:
    """Answers for a scheduler without any device: every row gets the same token."""
    rows = plan.batch.num_rows
    return StepOutputs(
        tokens=np.full((1, rows), token, np.int32),
        logprobs=np.zeros((1, rows), np.float32),
        finite=np.ones((1, rows), bool),
    )


class Loop:
    """schedule -> build -> device -> update, one transition at a time.

    Attributes:
      state: the scheduler's, checked after every transition.
      plans: every plan that was dispatched, in order.
      outputs: tokens delivered, by uid.
      ended: by uid; asserted to come once, with no token after it.
      cached: by uid, tokens found in the prefix cache at each of its admissions.
      resets: by uid, the number of tokens the request had each time it was evicted.
      num_offloads: times that an evicted request kept its KV in host memory.
      num_copies: blocks copied for forks.
      num_drains: times that pressure had to wait for the steps in flight.
      max_window: steps of a plan, at most.
      inputs: what the scheduler was given, in order: ("add", request), ("cancel", uid), ("schedule", max_window) or
        ("update", outputs).
    """

    def __init__(self, config: SchedulerConfig, *, depth: int = 0, max_window: int = 1) -> None:
        self.config, self.depth, self.max_window = config, depth, max_window
        self.device = make_device(config)
        self.ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
        self.state = initial_state(config)
        self.in_flight: deque[tuple[StepPlan, StepOutputs]] = deque()
        self.requests: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self.buckets: Counter = Counter()
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}
        self.cancelled: set[int] = set()
        self.resets: defaultdict[int, list[int]] = defaultdict(list)
        self.cached: defaultdict[int, list[int]] = defaultdict(list)
        self.num_drains = self.num_offloads = self.num_copies = 0
        self.inputs: list[tuple[str, Any]] = []

    def add(
        self,
        prompt: int | Sequence[int] | np.ndarray,
        max_new_tokens: int,
        eos: tuple[int, ...] = (),
        fork_of: int | None = None,
    ) -> int:
        """Submits a request; returns its uid, counted from 0."""
        uid = len(self.requests)
        request = replace(make_request(uid, prompt, max_new_tokens, eos), fork_of=fork_of)
        self.inputs.append(("add", request))
        self._become(add(self.state, request))
        self.requests[uid], self.outputs[uid] = request, []
        return uid

    def cancel(self, uid: int) -> bool:
        """Takes a request out; whether it was there must agree with what was delivered."""
        self.inputs.append(("cancel", uid))
        state, found = cancel(self.state, uid)
        alive = uid in self.requests and uid not in self.ended and uid not in self.cancelled
        assert found == alive
        if found:
            self.cancelled.add(uid)
            self.device.discard(uid)
        else:
            assert state is self.state
        self._become(state)
        return found

    def dispatch(self) -> StepPlan:
        """Plans a step and hands it to the device; an empty plan is returned and forgotten."""
        self.inputs.append(("schedule", self.max_window))
        plan, state = schedule(self.state, self.max_window)
        if plan.is_empty:
            assert state is self.state
            assert plan.soft_resets == plan.offloads == plan.restores == plan.admitted == ()
            assert not len(plan.table)
            assert not plan.drain or self.in_flight
            self.num_drains += plan.drain
            return plan
        self._become(state)
        for victim in (*plan.soft_resets, *plan.offloads):
            assert not self.in_flight, "victims chosen with a step in flight"
            assert victim.uid not in plan.batch.uid, "a victim runs in the step that it made room for"
            self.resets[victim.uid].append(len(self.outputs[victim.uid]))
        self.num_offloads += len(plan.offloads)
        for uid, incarnation in zip(plan.batch.uid.tolist(), plan.batch.incarnation.tolist(), strict=True):
            assert incarnation == len(self.resets[uid]), "a row does not say since which admission it runs"
        for admission in plan.admitted:
            self.cached[admission.uid].append(admission.num_cached)
            row = plan.batch.uid.tolist().index(admission.uid)
            held = admission.num_cached + admission.num_restored
            assert plan.batch.start[row] == held, "what is held is computed again, or more is skipped"
        bucket = self.ladder.select(plan.batch)
        descriptor = build(plan.batch, bucket, self.config.max_requests_per_batch)
        assert unpad(descriptor) == plan.batch
        for offload in plan.offloads:
            self.device.offload(offload)
        for restore in plan.restores:
            self.device.restore(restore)
        self.device.copy_blocks(plan.copies.sources, plan.copies.destinations)
        self.num_copies += len(plan.copies)
        self.device.update_table(plan.table)
        self._verify_table()
        answer = self.device.forward(descriptor, bucket)
        rows = plan.batch.num_rows
        outputs = StepOutputs(
            tokens=answer.tokens[:, :rows], logprobs=answer.logprobs[:, :rows], finite=answer.finite[:, :rows]
        )
        self.in_flight.append((plan, outputs))
        self.plans.append(plan)
        self.buckets[bucket] += 1
        return plan

    def _verify_table(self) -> None:
        """The device has been told every entry."""
        for slot, record in enumerate(self.state.records):
            if record is not None:
                told = self.device.table[:, slot, : record.table.shape[1]]
                assert np.array_equal(told, record.table), "the device's block table is not the scheduler's"

    def collect(self) -> None:
        """Applies the answers to the oldest plan in flight."""
        plan, outputs = self.in_flight.popleft()
        self.inputs.append(("update", outputs))
        state, results = update(self.state, plan, outputs)
        self._become(state)
        for uid, token in zip(results.uid.repeat(results.count).tolist(), results.tokens.tolist(), strict=True):
            assert uid not in self.ended, "a token after the end"
            assert uid not in self.cancelled, "a token after the cancel"
            self.outputs[uid].append(token)
        for ended in results.ended:
            assert ended.uid not in self.ended, "ended twice"
            self.ended[ended.uid] = ended

    def step(self) -> StepPlan:
        """What the engine's `step` does."""
        plan = self.dispatch()
        while self.in_flight and (plan.is_empty or len(self.in_flight) > self.depth):
            self.collect()
        return plan

    def run(self, *, max_steps: int = 5000) -> Loop:
        """Steps until nobody runs or waits, and compares everything with the solo runs."""
        for _ in range(max_steps):
            if self.state.is_idle:
                break
            was_in_flight = len(self.in_flight)
            assert not self.step().is_empty or was_in_flight, "requests wait and nothing runs"
        self.verify()
        return self

    def verify(self) -> None:
        """Every request ended once, for the right reason, with its solo run's tokens; nothing is held."""
        assert self.state.is_idle, "requests are left"
        assert self.state.pool.num_free == self.config.num_blocks
        assert not self.device.copies
        assert self.state.host_used == 0
        assert self.ended.keys() | self.cancelled == self.requests.keys()
        assert not self.ended.keys() & self.cancelled
        for uid, request in self.requests.items():
            expected = solo(request)
            if uid in self.cancelled:
                assert self.outputs[uid] == expected[: len(self.outputs[uid])], uid
                continue
            assert self.outputs[uid] == expected, uid
            stopped = expected[-1] in request.eos_token_ids
            token = expected[-1] if stopped else None
            assert self.ended[uid] == Ended(uid=uid, reason="stop" if stopped else "length", token=token)
        self.verify_resets()

    def verify_resets(self) -> None:
        """A victim gains at least one token before it is a victim again, which bounds all evictions."""
        for uid, tokens_at in self.resets.items():
            assert all(before < after for before, after in pairwise(tokens_at)), (
                uid,
                tokens_at,
            )
            assert len(tokens_at) <= len(self.outputs[uid]) + 1

    @property
    def num_resets(self) -> int:
        return sum(map(len, self.resets.values()))

    def rows(self) -> list[list[tuple[int, int]]]:
        """(uid, tokens) of every row of every step so far."""
        return [list(zip(p.batch.uid.tolist(), p.batch.count.tolist(), strict=True)) for p in self.plans]

    def _become(self, state) -> None:
        check(state)
        self.state = state


def random_config(rng: random.Random, policy: str, windows: Windows = (None,), **changes) -> SchedulerConfig:
    """A pool that a few requests already overfill."""
    groups = len(windows)
    num_blocks = rng.randint(4 * groups, 14 * groups)
    return make_config(
        policy=policy,
        windows=windows,
        num_blocks=num_blocks,
        block_size=rng.choice([4, 4, 5]),
        max_batch_tokens=rng.choice([1, 3, 4, 8, 16, 64]),
        max_requests_per_batch=rng.choice([1, 2, 4, 8, 8]),
        max_blocks_per_request=rng.choice([num_blocks, num_blocks, rng.randint(2, num_blocks)]),
        safety_margin=rng.choice([0.0, 0.0, 0.15, 0.5, 1.0]),
        **changes,
    )


def random_size(rng: random.Random, config: SchedulerConfig) -> tuple[int, int]:
    """(prompt tokens, new tokens) of a request that passes validation, often only just."""
    cells = config.max_request_tokens
    prompt = rng.randint(1, min(rng.choice([4, 24]), cells))
    return prompt, rng.randint(1, min(24, cells - prompt + 1))


def random_prompt(rng: random.Random, length: int) -> np.ndarray:
    """i32[length], which begins as those of some others do."""
    common = rng.choice([0, length, length // 2])
    text = make_prompt(64, seed=rng.randrange(2))
    return np.concatenate([text[:common], make_prompt(64, seed=rng.randrange(2, 99))[: length - common]])


def random_script(
    seed: int,
    depth: int,
    windows: Windows = (None,),
    *,
    forks: bool = False,
    max_window: int = 1,
    make: type[Loop] = Loop,
    **changes,
) -> Loop:
    """A few requests that come while others run, sometimes one is cancelled; all are compared with solo runs.

    Args:
      forks: some are continued several times.
      max_window: over 1, plans have up to as many steps, and some requests end by a token that they draw anywhere.
      make: what drives them.
      changes: fields of the config. With `shares_blocks` prompts begin alike.
    """
    rng = random.Random(seed)
    loop = make(random_config(rng, POLICIES[seed % 2], windows, **changes), depth=depth, max_window=max_window)
    shares = loop.config.shares_blocks
    to_come, burst = rng.randint(3, 12), rng.choice([0.3, 0.9])
    while to_come:
        while to_come and rng.random() < burst:
            prompt, new = random_size(rng, loop.config)
            ids = random_prompt(rng, prompt) if shares else prompt
            eos = tuple(range(rng.choice([0, 0, 30])))
            if max_window > 1 and rng.random() < 0.5:
                eos = (rng.choice(solo(make_request(len(loop.requests), ids, new))),)
            parent = loop.add(ids, new, eos)
            for _ in range(rng.choice([0, 0, 1, 3, 9]) if forks else 0):
                loop.add(loop.requests[parent].prompt, new, eos, fork_of=parent)
            to_come -= 1
        if loop.requests and rng.random() < 0.05:
            loop.cancel(rng.randrange(len(loop.requests)))
        loop.step()
    return loop.run()
