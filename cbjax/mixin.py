"""`ContinuousMixin`: the generation methods of every model, over one cached session."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cbjax.config import ContinuousBatchingConfig, GenerationConfig
from cbjax.engine import EngineStats
from cbjax.inputs import Prepared, Prompt, hints_of, prepare
from cbjax.progress import progress
from cbjax.requests import GenerationOutput, RequestState, RequestStatus
from cbjax.resolve import for_call
from cbjax.sampling import derive_seed
from cbjax.session import Session, reachable_buckets, rounded, session_key
from cbjax.step_record import Observer, StepRecord
from cbjax.summary import RunSummary, summarize

if TYPE_CHECKING:
    from cbjax.config import WorkloadHints
    from cbjax.text import Tokenizer

log = logging.getLogger(__name__)


class ContinuousMixin:
    """Continuous batching for a model that has the attributes below.

    Attributes:
      generation_config, continuous_batching_config: what is used when a call gives none.
      summary: of the last call, for people; None before the first.
      last_outputs: of the last call, also if it was interrupted: then with the tokens that had come.
      observers: called with the `StepRecord` of each step once it is dispatched, on the thread that runs the engine.
    """

    generation_config: GenerationConfig
    continuous_batching_config: ContinuousBatchingConfig
    params: dict[Any, Any]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int

    def __init__(self) -> None:
        self.continuous_batching_config = ContinuousBatchingConfig()
        self.summary: RunSummary | None = None
        self.last_outputs: dict[str, GenerationOutput] = {}
        self.observers: list[Observer] = []
        self._session: Session | None = None
        self._auto_ids = itertools.count()
        self._busy = threading.Lock()
        self._holder: int | None = None

    def generate_batch(
        self,
        inputs: Sequence[Prompt],
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *,
        progress_bar: bool = False,
        warmup: bool = True,
        request_ids: Sequence[str] | None = None,
    ) -> dict[str, GenerationOutput]:
        """Generates for every prompt, batched continuously, and returns when all have ended.

        A bad prompt (empty, ids outside the vocabulary, too long for the pool, ...) gets an output with status FAILED
        and the reason in `error`; the others are not touched by it. A second call with the same settings reuses
        store and programs.

        Args:
          inputs: token ids, text, or chat messages, in any mixture.
          generation_config: one for all, or one per prompt; None: the model's own.
          continuous_batching_config: how to batch; None: the model's own, at first the defaults.
          progress_bar: show progress of compiling and of the requests.
          warmup: compile what the job can reach before it starts, so that no step waits for a compiler.
          request_ids: a name for each prompt; None: "req_0", "req_1", ... over the life of the model.

        Returns:
          Outputs by request id, in the order of `inputs`.

        Raises:
          TypeError, ValueError: the call as a whole cannot be served (no list, a pool larger than the memory, ...).
        """
        with self._exclusive():
            job = _Job(self, inputs, generation_config, continuous_batching_config, request_ids)
            with job.running(warmup=warmup, progress_bar=progress_bar):
                total = len(job.requests)
                with progress(show=progress_bar, total=total, desc="generating", unit="request") as bar:
                    for touched in job.steps():
                        bar.update(sum(request.status >= RequestStatus.FINISHED for request in touched))
                        bar.set_postfix_str(job.progress(), refresh=False)
            return self.last_outputs

    def stream(
        self,
        prompt: Prompt,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *,
        progress_bar: bool = False,
    ) -> Iterator[GenerationOutput]:
        """Generates for one prompt and yields a snapshot after each token; the last one is terminal.

        `text` holds the characters that are certain so far: it never has to be taken back. Closing the iterator
        cancels the request. Until it is closed or exhausted, other threads' calls to this model wait.

        Raises:
          As `generate_batch`; a bad prompt yields one FAILED output.
        """
        from cbjax.text import Detokenizer

        with self._exclusive():
            job = _Job(self, [prompt], generation_config, continuous_batching_config, None)
            with job.running(warmup=True, progress_bar=progress_bar):
                detokenizer = Detokenizer(self.tokenizer) if self.tokenizer else None
                text, told = "", 0
                for (request,) in filter(None, job.steps()):
                    if detokenizer:
                        text += detokenizer.add(request.generated_tokens[told:])
                        told = len(request.generated_tokens)
                    if request.status < RequestStatus.FINISHED:
                        yield request.snapshot(text)
            last = next(iter(self.last_outputs.values()))
        yield last

    @contextmanager
    def recording(self) -> Iterator[list[StepRecord]]:
        """Collects a record of every step dispatched in the block: who ran, in which blocks, and how it was padded.

        For looking at runs, not for days of serving: every record keeps its step's scheduler state.
        """
        records: list[StepRecord] = []
        observer = records.append
        self.observers.append(observer)
        try:
            yield records
        finally:
            self.observers.remove(observer)

    @property
    def session(self) -> Session | None:
        """The session kept from the last call: engine, programs, and `session.resolved.report()`."""
        return self._session

    def close(self) -> None:
        """Gives the KV store's memory back and forgets the programs; the next call starts anew. Weights stay."""
        with self._exclusive():
            self._drop_session()

    def _drop_session(self) -> None:
        session, self._session = self._session, None  # first, so that an interrupt leaves no half-closed session
        if session is not None:
            session.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time: other threads wait, and a call from within a call is an error, not a deadlock."""
        me = threading.get_ident()
        if self._holder == me:
            raise RuntimeError("this model is generating: finish or close the running call (or stream) first")
        with self._busy:
            try:
                self._holder = me
                yield
            finally:
                self._holder = None

    def _session_for(self, config: ContinuousBatchingConfig, hints: WorkloadHints) -> Session:
        session = self._session
        if session is not None and session.key == session_key(config) and session.covers(hints):
            session.resolved = for_call(session.resolved, config)
            return session
        if session is not None:
            why = "a larger workload" if session.key == session_key(config) else "other settings"
            log.warning("%s: a new KV store replaces the old one, and its programs are compiled", why)
        self._drop_session()
        self._session = Session(self, config, rounded(hints))  # pyright: ignore[reportArgumentType]
        return self._session

    def _names(self, count: int, given: Sequence[str] | None) -> list[str]:
        if given is None:
            return [f"req_{next(self._auto_ids)}" for _ in range(count)]
        names = [] if isinstance(given, str) else list(given)
        if len(names) != count or not all(isinstance(name, str) for name in names):
            raise ValueError(f"request_ids must be a sequence of one str per prompt ({count}); got {given!r:.80}")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"request_ids must differ; given more than once: {', '.join(map(repr, twice[:5]))}")
        return names


class _Job:
    """One call: its requests, from inputs to outputs."""

    def __init__(
        self,
        lm: ContinuousMixin,
        inputs: Sequence[Prompt],
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        config: ContinuousBatchingConfig | None,
        request_ids: Sequence[str] | None,
    ) -> None:
        self.lm, self.config = lm, lm.continuous_batching_config if config is None else config
        if not isinstance(self.config, ContinuousBatchingConfig):
            kind = type(config).__name__
            raise TypeError(f"continuous_batching_config must be a ContinuousBatchingConfig or None; got {kind}")
        count = len(inputs) if hasattr(inputs, "__len__") else 0
        configs = lm.generation_config if generation_config is None else generation_config
        self.prepared = prepare(inputs, configs, lm._names(count, request_ids), lm.tokenizer)
        fixed = self.config.num_blocks
        self.max_tokens = None if fixed is None else fixed * self.config.block_size
        self.session = lm._session_for(self.config, hints_of(self.prepared, lm.max_positions, self.max_tokens))
        self.engine = self.session.engine
        self.requests: list[RequestState] = []
        self.refused: dict[int, GenerationOutput] = {}
        self.started = self.warmup_seconds = 0.0

    def steps(self) -> Iterator[list[RequestState]]:
        """Runs the engine to the end; yields the requests that each step touched."""
        while not self.engine.is_idle:
            yield self.engine.step()

    @contextmanager
    def running(self, *, warmup: bool, progress_bar: bool) -> Iterator[None]:
        """Submits, and whatever happens leaves no request alive, no block held, and the outputs in `last_outputs`."""
        self.engine.stats = EngineStats()
        self.session.device.params = self.lm.params
        before = len(self.session.device.programs)
        try:
            if warmup:
                self._warmup(progress_bar)
            self.started = time.perf_counter()
            self._submit()
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                self.engine.abort(RequestStatus.FAILED, "failed", f"the engine stopped: {error}")
            else:  # an interrupt, or a stream that was closed
                self.engine.abort(RequestStatus.CANCELLED, "cancelled", "interrupted")
            raise
        finally:
            self._finish(before)

    def _warmup(self, progress_bar: bool) -> None:
        resolved = self.session.resolved
        hints = [hints_of([p], self.lm.max_positions, self.max_tokens) for p in self.prepared]
        buckets = reachable_buckets(resolved, [h for h in hints if h.num_requests])
        start = time.perf_counter()
        self.session.warmup(buckets, progress_bar=progress_bar)
        self.warmup_seconds = time.perf_counter() - start

    def _submit(self) -> None:
        base = secrets.randbits(63) if self.config.seed is None else self.config.seed
        for p in self.prepared:
            try:
                if p.error is not None:
                    raise ValueError(p.error)
                self.requests.append(self._submit_one(p, derive_seed(base, p.index)))
            except (TypeError, ValueError) as error:
                log.warning("request %s is refused: %s", p.request_id, error)
                self.refused[p.index] = _without_tokens(p, RequestStatus.FAILED, str(error))

    def _submit_one(self, p: Prepared, seed: int) -> RequestState:
        eos = p.config.eos_token_ids(self.lm.eos_token_ids)
        return self.engine.submit(
            p.request_id,
            p.prompt,
            max_new_tokens=p.config.max_new_tokens,
            eos_token_ids=eos,
            sampling=p.config.sampling(seed=seed, logprobs=self.config.return_logprobs),
        )

    def progress(self) -> str:
        """Tokens so far, and how many run and wait."""
        tokens = sum(len(request.generated_tokens) for request in self.requests)
        rate = tokens / max(time.perf_counter() - self.started, 1e-9)
        state = self.engine.state
        return f"{tokens} tokens, {rate:.0f}/s, {state.num_active} running, {len(state.waiting)} waiting"

    def _finish(self, programs_before: int) -> None:
        seconds = time.perf_counter() - self.started if self.started else 0.0
        decode: Callable[[list[int]], str] = self.lm.tokenizer.decode if self.lm.tokenizer else lambda ids: ""
        done = {state.request_id: state for state in self.requests}
        outputs = {}
        for p in self.prepared:
            if p.index in self.refused:
                outputs[p.request_id] = self.refused[p.index]
            elif p.request_id in done:
                state = done[p.request_id]
                snapshot = state.snapshot(decode(state.generated_tokens))
                outputs[p.request_id] = snapshot
            else:
                outputs[p.request_id] = _without_tokens(
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
            num_blocks=self.session.resolved.scheduler.num_blocks,
        )


def _without_tokens(p: Prepared, status: RequestStatus, error: str) -> GenerationOutput:
    """The output of a request that never reached the engine."""
    return GenerationOutput(
        request_id=p.request_id,
        prompt_ids=[int(i) for i in p.prompt if isinstance(i, int | np.integer)],
        generated_tokens=[],
        status=status,
        error=error,
        finish_reason=status.name.lower(),
        created_time=time.time(),
    )
