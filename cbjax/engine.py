"""The imperative shell around the pure scheduler: schedule -> build -> dispatch -> update.

One thread runs it. Everything that touches the KV store is dispatched in plan order, and data dependency on the store
orders the rest, so blocks freed by one step can be used by the next. Up to `depth` steps stay in flight; their answers
are read in order. Where nothing is lost by it, one dispatch is a window of several decode steps.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from rpds import HashTrieMap

from cbjax.accounting import EngineStats, count_step
from cbjax.descriptor import BatchDescriptor, Bucket, build
from cbjax.ladder import Ladder
from cbjax.pace import Pace
from cbjax.recording import LiveScheduler
from cbjax.requests import RequestState, RequestStatus
from cbjax.sampling import SamplingParams
from cbjax.scheduler import (
    Offload,
    Request,
    Restore,
    SchedulerConfig,
    SchedulerState,
    StepOutputs,
    StepPlan,
    StepResults,
    TableDelta,
)
from cbjax.step_record import Observer, RequestIds, StepRecord
from cbjax.strict import check_int, checked_ids
from cbjax.tracing import Tracer

_NO_WORDS = np.empty(0, np.uint32)


class Device(Protocol):
    """Where steps run: the compiled model, or a fake."""

    def update_table(self, delta: TableDelta) -> None: ...

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> Any:
        """Answers with `tokens`, `logprobs` and `finite`: [steps, rows of the bucket], at least the batch's window."""
        ...

    def offload(self, offload: Offload) -> None:
        """Keeps blocks' content in host memory; before anything of the same plan writes to the store."""
        ...

    def restore(self, restore: Restore) -> None:
        """Brings content back, and drops the copy."""
        ...

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copies blocks within the store, i32[copies] each; all sources are read before any destination is written."""
        ...

    def discard(self, uid: int) -> None:
        """Drops a copy that nobody will restore; nothing if there is none."""
        ...

    def recover(self) -> None:
        """After an abort, with no request alive: sound arrays, and no copy in host memory."""
        ...


class Engine:
    """Owns the state of a run; see the module's docstring.

    Attributes:
      scheduler: its state, and whoever records what it is given.
      alive: requests that have not ended, by uid, in order of submission.
      stats: counts.
      depth: dispatches in flight while the next one is planned.
      pace: how many steps a dispatch may have.
      observers: called with each step's record once it is dispatched; one that raises stops the engine.
      tracer: is told of each phase, step and end.
    """

    def __init__(
        self,
        device: Device,
        config: SchedulerConfig,
        ladder: Ladder,
        *,
        vocab_size: int,
        max_positions: int,
        depth: int = 0,
        pace: Pace | None = None,
        observers: Sequence[Observer] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self.device, self.ladder = device, ladder
        self.depth, self.pace = depth, pace or Pace()
        self.observers, self.tracer = observers, tracer or Tracer()
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.scheduler = LiveScheduler(config)
        self.alive: dict[int, RequestState] = {}
        self.stats = EngineStats()
        self._by_id: dict[str, RequestState] = {}
        self._names: HashTrieMap[int, str] = HashTrieMap()  # by uid; one that is never written, for records
        self._uids = itertools.count()
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()  # plan, answer, when it was dispatched

    @property
    def state(self) -> SchedulerState:
        """The scheduler's."""
        return self.scheduler.state

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int | None,
        eos_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        created: float | None = None,
        fork_of: RequestState | None = None,
        continuation: int = 0,
    ) -> RequestState:
        """Puts a request into the waiting line.

        Args:
          request_id: must not be one of a request that is alive.
          prompt: token ids, at least one, each in ``[0, vocab_size)``; `eos_token_ids` likewise.
          max_new_tokens: None means as many as the model's positions and the pool allow.
          sampling: how output tokens are chosen, and whether their logprobs are wanted.
          created: when it was handed in, by `time.perf_counter`; None: now.
          fork_of: a request submitted before with the same prompt, which is then computed once for both.
          continuation: told in the output; which of its prompt's continuations it is, from 0.

        Raises:
          TypeError, ValueError: what was handed in cannot be served; nothing else is touched.
        """
        if request_id in self._by_id:
            raise ValueError(f"request_id {request_id!r} is in use by a request that has not ended; choose another")
        ids, limit = self.check(prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
        request = Request(
            uid=next(self._uids),
            prompt=ids,
            max_new_tokens=limit,
            eos_token_ids=eos_token_ids,
            words=sampling.pack(),
            fork_of=None if fork_of is None else fork_of.uid,
        )
        self.scheduler.add(request)
        now = time.perf_counter()
        created = now if created is None else created
        state = RequestState(
            request_id=request_id,
            uid=request.uid,
            prompt=ids,
            max_new_tokens=limit,
            wants_logprobs=sampling.logprobs,
            continuation=continuation,
            created_time=time.time() - (now - created),
            created=created,
        )
        self.alive[request.uid] = self._by_id[request_id] = state
        self._names = self._names.insert(request.uid, request_id)
        return state

    def check(
        self, prompt: Sequence[int] | np.ndarray, *, max_new_tokens: int | None, eos_token_ids: tuple[int, ...]
    ) -> tuple[np.ndarray, int]:
        """A request's ids and the number of its output tokens at most. Changes nothing; any thread may call it.

        Raises:
          TypeError, ValueError: as `submit`.
        """
        max_new_tokens = check_int("max_new_tokens", max_new_tokens, minimum=1, none=True)
        ids = checked_ids(prompt, eos_token_ids, self.vocab_size)
        limit = self._limit(len(ids), max_new_tokens)
        self.scheduler.check(Request(uid=-1, prompt=ids, max_new_tokens=limit, eos_token_ids=(), words=_NO_WORDS))
        return ids, limit

    def num_cached(self, prompt: Sequence[int] | np.ndarray) -> int:
        """Tokens of this prompt that the prefix cache has now. Changes nothing."""
        ids = np.asarray(prompt, np.int32)
        request = Request(uid=-1, prompt=ids, max_new_tokens=1, eos_token_ids=(), words=_NO_WORDS)
        return self.scheduler.num_cached(request)

    def _limit(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        """Output tokens after which a request ends with "length"; the model's positions are such an end, too."""
        room = self.max_positions - prompt_tokens
        if room < 1:
            raise ValueError(
                f"the model has {self.max_positions} positions and the prompt has {prompt_tokens} tokens, "
                "which leaves no place for a new one; shorten the prompt"
            )
        if max_new_tokens is None:
            return max(1, min(room, self.state.config.max_request_tokens - prompt_tokens + 1))
        return min(room, max_new_tokens)

    def cancel(self, request_id: str) -> RequestState | None:
        """Ends a request now; its blocks are free at once. None if no such request is alive."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        found = self.scheduler.cancel(request.uid)
        assert found
        self._end(request, RequestStatus.CANCELLED, "cancelled", time.perf_counter())
        return request

    @property
    def is_idle(self) -> bool:
        """No request is alive and nothing is in flight."""
        return not self.alive and not self._in_flight

    def step(self) -> list[RequestState]:
        """Runs one step or window, and reads the answers that are due.

        Returns:
          Requests that gained a token or ended, each once.
        """
        with self.tracer.schedule:
            plan = self.scheduler.schedule(self._max_window())
        if not plan.is_empty:
            self._dispatch(plan)
        touched: dict[int, RequestState] = {}
        while self._in_flight and (plan.is_empty or len(self._in_flight) > self.depth):
            for request in self._collect():
                touched[request.uid] = request
        return list(touched.values())

    def _max_window(self) -> int:
        steps = self.pace.window()
        return steps if steps == 1 else self.ladder.windows(steps, self.state.num_active)

    def _dispatch(self, plan: StepPlan) -> None:
        batch = plan.batch
        with self.tracer.build:
            bucket = self.ladder.select(batch)
            descriptor = build(batch, bucket, self.state.config.max_requests_per_batch)
        with self.tracer.dispatch:
            for offload in plan.offloads:
                self.device.offload(offload)
            for restore in plan.restores:
                self.device.restore(restore)
            if len(plan.copies):
                self.device.copy_blocks(plan.copies.sources, plan.copies.destinations)
            self.device.update_table(plan.table)
            dispatched = time.perf_counter()
            answer = self.device.forward(descriptor, bucket)
        self._in_flight.append((plan, answer, dispatched))
        with self.tracer.account:
            count_step(self.stats, plan, bucket, self.state, self.alive)
        if self.observers or self.tracer.listeners:
            self._tell(plan, bucket, answer)

    def _tell(self, plan: StepPlan, bucket: Bucket, answer: Any) -> None:
        now = time.perf_counter()
        names = RequestIds(self._names)
        record = StepRecord(plan=plan, bucket=bucket, state=self.state, request_ids=names, dispatched=now)
        for observer in self.observers:
            observer(record)
        self.tracer.dispatched(record, answer)

    def _collect(self) -> list[RequestState]:
        plan, answer, dispatched = self._in_flight[0]
        window, rows = plan.batch.window, plan.batch.num_rows
        with self.tracer.read:
            outputs = StepOutputs(
                tokens=np.asarray(answer.tokens)[:window, :rows],
                logprobs=np.asarray(answer.logprobs)[:window, :rows],
                finite=np.asarray(answer.finite)[:window, :rows],
            )
        self._in_flight.popleft()
        if plan.batch.num_tokens == rows:
            self.pace.measure(window, dispatched=dispatched, read=time.perf_counter())
        with self.tracer.update:
            results = self.scheduler.update(plan, outputs)
            touched = self._deliver(results)
        self.tracer.updated(plan, results)
        return touched

    def _deliver(self, results: StepResults) -> list[RequestState]:
        now = time.perf_counter()
        touched = [self.alive[uid] for uid in results.uid.tolist()]
        tokens, logprobs = results.tokens.tolist(), results.logprobs.tolist()
        start = 0
        for request, count in zip(touched, results.count.tolist(), strict=True):
            request.status = RequestStatus.DECODING
            moment = now - request.created
            if count == 1:  # as in most steps; slices would take thrice as long
                request.generated_tokens.append(tokens[start])
                request.timestamps.append(moment)
                if request.wants_logprobs:
                    request.logprobs.append(logprobs[start])
            else:
                request.generated_tokens += tokens[start : start + count]
                request.timestamps += [moment] * count
                if request.wants_logprobs:
                    request.logprobs += logprobs[start : start + count]
            start += count
        for ended in results.ended:
            request = self.alive[ended.uid]
            if ended.reason == "failed":
                touched.append(request)
                error = "the model's logits were not finite (NaN or infinite): check the weights and the dtype"
                self._end(request, RequestStatus.FAILED, "failed", now, error)
            else:
                self._end(request, RequestStatus.FINISHED, ended.reason, now)
        return touched

    def _end(
        self, request: RequestState, status: RequestStatus, reason: str, now: float, error: str | None = None
    ) -> None:
        request.end(status, reason, now, error)
        if request.num_offloads:
            self.device.discard(request.uid)
        del self.alive[request.uid], self._by_id[request.request_id]
        self._names = self._names.remove(request.uid)
        self.tracer.ended(request)

    def renew(self) -> None:
        """To be called when other weights compute from now on: no KV of the old ones is found again."""
        self.scheduler.renew()
        for uid in self.alive:
            self.device.discard(uid)

    def abort(self, status: RequestStatus, reason: str, error: str | None = None) -> list[RequestState]:
        """Ends every request and forgets what is in flight: after an interrupt, an error, or at close.

        Works whatever was interrupted: the scheduler starts from an empty state, and the device checks its arrays.
        """
        now, ended = time.perf_counter(), list(self.alive.values())
        self._in_flight.clear()
        self.scheduler.reset()
        self.alive, self._by_id, self._names = {}, {}, HashTrieMap()
        for request in ended:
            if request.status < RequestStatus.FINISHED:
                request.end(status, reason, now, error)
                self.tracer.ended(request)
        self.tracer.aborted()
        self.device.recover()
        return ended
