"""One call of `generate_batch` or `stream`: its requests, from inputs to outputs."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbjax.accounting import EngineStats
from cbjax.config import ContinuousBatchingConfig
from cbjax.inputs import Prepared, hints_of
from cbjax.overlap import UNWATCHED_SECONDS
from cbjax.requests import GenerationOutput, RequestState, RequestStatus
from cbjax.sampling import derive_seed
from cbjax.session import Session, reachable_buckets
from cbjax.submission import output_of, submit, without_tokens
from cbjax.summary import summarize

if TYPE_CHECKING:
    from cbjax.mixin import ContinuousMixin

log = logging.getLogger(__name__)


class Job:
    """A call that has the engine for itself.

    Attributes:
      prepared: its inputs.
      requests: those that the engine accepted.
      refused: outputs of the others, by name.
    """

    def __init__(
        self, lm: ContinuousMixin, config: ContinuousBatchingConfig, prepared: Sequence[Prepared], session: Session
    ) -> None:
        self.lm, self.config, self.prepared, self.session = lm, config, prepared, session
        self.engine = session.engine
        self.requests: list[RequestState] = []
        self.refused: dict[str, GenerationOutput] = {}
        self.started = self.warmup_seconds = 0.0

    def steps(self) -> Iterator[list[RequestState]]:
        """Runs the engine to the end; yields the requests that each step touched."""
        while not self.engine.is_idle:
            yield self.engine.step()

    @contextmanager
    def running(self, *, warmup: bool, progress_bar: bool, watched: bool = False) -> Iterator[None]:
        """Submits, and whatever happens leaves no request alive, no block held, and the outputs in `last_outputs`.

        Args:
          watched: tokens are told as they come, so windows stay within the latency that was asked for.
        """
        self.engine.stats = EngineStats()
        self.engine.pace.max_seconds = self.config.max_window_latency if watched else UNWATCHED_SECONDS
        self.session.use(self.lm.params)
        before = len(self.session.device.programs)
        try:
            if warmup or self.config.batch_invariant:
                self._warmup(progress_bar)
            self.started = time.perf_counter()
            self._submit()
            yield
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                self._cancel()
            elif isinstance(error, Exception):
                self.engine.abort(RequestStatus.FAILED, "failed", f"the engine stopped: {str(error) or repr(error)}")
            else:
                self.engine.abort(RequestStatus.CANCELLED, "cancelled", "interrupted")
            raise
        finally:
            self._finish(before)

    def _cancel(self) -> None:
        """After a stream was closed, which is between two steps: its request goes, and what is cached stays."""
        try:
            for request in self.requests:
                self.engine.cancel(request.request_id)
            for _ in self.steps():
                pass
        except BaseException:
            self.engine.abort(RequestStatus.CANCELLED, "cancelled", "interrupted")
            raise

    def _warmup(self, progress_bar: bool) -> None:
        max_tokens = max_request_tokens(self.config)
        hints = [hints_of([p], self.lm.max_positions, max_tokens) for p in self.prepared]
        served = [(p, h) for p, h in zip(self.prepared, hints, strict=True) if h.num_requests]
        cached = self.engine.num_cached(served[0][0].prompt) if len(served) == 1 else 0
        buckets = reachable_buckets(
            self.session.resolved,
            [h for _, h in served],
            cached=cached,
            forked=sum(len(p.prompt) - 1 for p, _ in served if p.continuation),
        )
        start = time.perf_counter()
        forks = any(p.continuation for p in self.prepared)
        self.session.warmup(buckets, forks=forks, progress_bar=progress_bar)
        self.warmup_seconds = time.perf_counter() - start

    def _submit(self) -> None:
        first: dict[int, RequestState] = {}  # of each prompt's continuations
        base = secrets.randbits(63) if self.config.seed is None else self.config.seed
        eos, logprobs = self.lm.eos_token_ids, self.config.return_logprobs
        for p in self.prepared:
            try:
                seed = derive_seed(base, p.index)
                fork_of = first.get(p.index)
                state = submit(self.engine, p, seed=seed, eos_token_ids=eos, logprobs=logprobs, fork_of=fork_of)
                self.requests.append(state)
                first.setdefault(p.index, state)
            except (TypeError, ValueError) as error:
                log.warning("request %s is refused: %s", p.request_id, error)
                self.refused[p.request_id] = without_tokens(p, RequestStatus.FAILED, str(error))

    def progress(self) -> str:
        """Tokens so far, and how many run and wait."""
        tokens = sum(len(request.generated_tokens) for request in self.requests)
        rate = tokens / max(time.perf_counter() - self.started, 1e-9)
        state = self.engine.state
        return f"{tokens} tokens, {rate:.0f}/s, {state.num_active} running, {len(state.waiting)} waiting"

    def _finish(self, programs_before: int) -> None:
        seconds = time.perf_counter() - self.started if self.started else 0.0
        done = {state.request_id: state for state in self.requests}
        outputs = {}
        for p in self.prepared:
            if p.request_id in self.refused:
                outputs[p.request_id] = self.refused[p.request_id]
            elif p.request_id in done:
                outputs[p.request_id] = output_of(done[p.request_id], self.lm.tokenizer)
            else:
                outputs[p.request_id] = without_tokens(
                    p, RequestStatus.CANCELLED, "interrupted before it was submitted"
                )
        self.lm.last_outputs = outputs
        programs = list(self.session.device.programs.values())[programs_before:]
        self.lm.summary = summarize(
            outputs.values(),
            self.engine.stats,
            programs,
            warmup_seconds=self.warmup_seconds,
            seconds=seconds,
            scheduler=self.session.resolved.scheduler,
            block_bytes=self.session.resolved.block_bytes,
        )


def max_request_tokens(config: ContinuousBatchingConfig) -> int | None:
    """Tokens that one request can have at most, where the config fixes that."""
    return None if config.num_blocks is None else config.num_blocks * config.block_size
