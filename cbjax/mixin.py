"""`ContinuousMixin`: the generation methods of every model.

A model has one session, so one KV store: each call has it for itself, and a manager has it from `start` to the end of
its loop.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from cbjax.config import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.inputs import Prompt, checked_names, hints_of, prepare
from cbjax.job import Job, max_request_tokens
from cbjax.manager import ContinuousBatchingManager
from cbjax.progress import progress
from cbjax.recording import RecordingWriter
from cbjax.requests import GenerationOutput, RequestStatus
from cbjax.resolve import for_call
from cbjax.session import Session, rounded, session_key
from cbjax.step_record import Observer, StepRecord
from cbjax.summary import RunSummary
from cbjax.timeline import DEFAULT_MAX_STEPS, Timeline
from cbjax.tracing import Tracer

if TYPE_CHECKING:
    from cbjax.text import Tokenizer

log = logging.getLogger(__name__)


class ContinuousMixin:
    """Continuous batching for a model that has the attributes below.

    Attributes:
      generation_config, continuous_batching_config: what is used when a call gives none.
      summary: of the last call, for people; None before the first.
      last_outputs: of the last call, also if it was interrupted: then with the tokens that had come.
      observers: called with the `StepRecord` of each step once it is dispatched, on the thread that runs the engine.
      tracer: tells of each phase and step; its phases are annotations of jax's profiler.
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
        self.tracer = Tracer()
        self._journal: RecordingWriter | None = None
        self._session: Session | None = None
        self._manager: ContinuousBatchingManager | None = None
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
          warmup: compile what the job can reach before it starts, so that no step waits for a compiler. With
            `batch_invariant` the first call compiles and compares every program, whatever is given here.
          request_ids: a name for each prompt; None: "req_0", "req_1", ... over the life of the model. Further
            continuations of a prompt (`num_return_sequences`) follow it as "<its name>__child#1", ...

        Returns:
          Outputs by request id, in the order of `inputs`.

        Raises:
          TypeError, ValueError: the call as a whole cannot be served (no list, a pool larger than the memory, ...).
          RuntimeError: a manager of this model is running, or `batch_invariant` was asked for and no program has it.
        """
        with self._exclusive():
            job = self._job(inputs, generation_config, continuous_batching_config, request_ids)
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
            job = self._job([prompt], generation_config, continuous_batching_config, None)
            if len(job.prepared) > 1:
                raise ValueError(
                    f"stream yields one continuation; got num_return_sequences={len(job.prepared)}: "
                    "use generate_batch, or a manager and its add_request(streaming=True)"
                )
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

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> ContinuousBatchingManager:
        """A new manager for this model: requests come and go while its loop runs in the background.

        Nothing is allocated before its `start` (or `warmup`). One manager of a model can run at a time, and while it
        does, `generate_batch`, `stream` and `close` raise RuntimeError: there is one KV store.

        Args:
          generation_config: of requests that bring none; None: the model's own.
          continuous_batching_config: how to batch; None: the model's own, at first the defaults.
          workload_hints: sizes the KV store and the warm-up; requests that are too large for it are refused. None: all
            the memory that may be taken, on a CPU a store of some ten thousand tokens.

        Raises:
          TypeError: an argument of another type.
        """
        return ContinuousBatchingManager(self, generation_config, continuous_batching_config, workload_hints)

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        *,
        block: bool = True,
        timeout: float | None = None,
        warmup: bool = True,
    ) -> Iterator[ContinuousBatchingManager]:
        """A manager that runs inside the `with`; at its end what was submitted is finished, then the loop stops.

        Results that nobody fetched can be fetched afterwards. After an exception nothing is finished: every request
        ends as CANCELLED. The KV store and the programs stay with the model, as after `generate_batch`.

        Args:
          block, timeout: as in `ContinuousBatchingManager.stop`.
          warmup: compile first, so that no step waits for a compiler: what the hints can reach, without hints all.
          The others: as in `init_continuous_batching`.
        """
        manager = self.init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        if warmup:
            manager.warmup()
        manager.start()
        try:
            yield manager
            if not manager.stop(block=block, timeout=timeout) and block:
                log.warning("the manager still runs after timeout=%s s; it ends when its requests have ended", timeout)
        except BaseException:
            manager.stop(hard_stop=True)
            raise

    @property
    def manager(self) -> ContinuousBatchingManager | None:
        """The manager that is running, if one is."""
        return self._manager

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

    @contextmanager
    def timeline(self, *, max_steps: int = DEFAULT_MAX_STEPS) -> Iterator[Timeline]:
        """Records what every step in the block was and when: calls, streams and managers alike.

        `print(timeline)` shows medians by program and the device-active fraction of wall clock; `timeline.save(path)`
        writes a trace for https://ui.perfetto.dev. It holds request ids and no other text. Costs some microseconds a
        step, and 200 bytes for each of the last `max_steps`; older ones are dropped, and counted.

        Raises:
          TypeError, ValueError: `max_steps` is no int of at least 1.
        """
        timeline = Timeline(max_steps=max_steps)
        self.tracer.add(timeline.recorder)
        try:
            yield timeline
        finally:
            self.tracer.remove(timeline.recorder)

    @contextmanager
    def record_to(self, path: str | PathLike[str]) -> Iterator[None]:
        """Writes what the scheduler is given to a file: all that runs in the block, calls and managers alike.

        `cbjax.replay(path)` or the command `cbjax replay` then go through the same steps without the model. The file
        is written as the engine runs, so it is of use after a crash, too. It holds the token ids of prompts and
        outputs (`cbjax replay FILE --anonymise OUT` replaces them), no text, no names and no weights.

        The first call in the block begins with an empty prefix cache. An existing file is replaced.

        Raises:
          OSError: the file cannot be made.
          RuntimeError: a call or a manager of this model is running, or the model is being recorded.
        """
        with self._exclusive():
            if self._journal is not None:
                raise RuntimeError("this model is being recorded, and to one file at a time: leave that block first")
            journal = self._journal = RecordingWriter(path)
        try:
            yield
        finally:
            self._journal = None
            journal.close()

    @property
    def session(self) -> Session | None:
        """The session kept from the last call: engine, programs, and `session.resolved.report()`."""
        return self._session

    def close(self) -> None:
        """Gives the KV store's memory back and forgets the programs; the next call starts anew. Weights stay.

        Raises:
          RuntimeError: a manager of this model is running.
        """
        with self._exclusive():
            self._drop_session()

    def _drop_session(self) -> None:
        session, self._session = self._session, None  # first, so that an interrupt leaves no half-closed session
        if session is not None:
            session.close()

    def _release(self, session: Session) -> None:
        """Closes a session, if it is still the model's and nobody uses it."""
        with self._busy:
            if self._session is session and self._manager is None:
                self._drop_session()

    def _give_up_session(self, session: Session) -> None:
        """Forgets a session whose device failed."""
        if self._session is session:
            try:
                self._drop_session()
            except Exception:
                log.exception("the lost KV store could not be closed")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time: other threads wait, and a call from within a call is an error, not a deadlock.

        Raises:
          RuntimeError: so it is, or a manager has the KV store.
        """
        me = threading.get_ident()
        if self._holder == me:
            raise RuntimeError("this model is generating: finish or close the running call (or stream) first")
        with self._busy:
            if self._manager is not None:
                raise RuntimeError(
                    "a manager of this model is running, and there is one KV store: submit to it (`add_requests`), or "
                    "stop it first; it is the model's attribute `manager`"
                )
            try:
                self._holder = me
                yield
            finally:
                self._holder = None

    def _job(
        self,
        inputs: Sequence[Prompt],
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        config: ContinuousBatchingConfig | None,
        request_ids: Sequence[str] | None,
    ) -> Job:
        config = self.continuous_batching_config if config is None else config
        if not isinstance(config, ContinuousBatchingConfig):
            kind = type(config).__name__
            raise TypeError(f"continuous_batching_config must be a ContinuousBatchingConfig or None; got {kind}")
        count = len(inputs) if hasattr(inputs, "__len__") else 0
        configs = self.generation_config if generation_config is None else generation_config
        if request_ids is None:
            names = [f"req_{next(self._auto_ids)}" for _ in range(count)]
        else:
            names = checked_names(count, request_ids)
        prepared = [each for p in prepare(inputs, configs, names, self.tokenizer) for each in p.continuations()]
        checked_names(len(prepared), [p.request_id for p in prepared])
        hints = hints_of(prepared, self.max_positions, max_request_tokens(config))
        return Job(self, config, prepared, self._session_for(config, hints, rounded(hints)))

    def _session_for(
        self, config: ContinuousBatchingConfig, hints: WorkloadHints, sizes: WorkloadHints, *, open_ended: bool = False
    ) -> Session:
        """The session that is there, if it is as good as a new one for `hints`; else a new one, made for `sizes`."""
        session = self._session
        if session is not None and session.key == session_key(config) and session.covers(hints, open_ended=open_ended):
            session.resolved = for_call(session.resolved, config)
        else:
            if session is not None:
                why = "a larger workload" if session.key == session_key(config) else "other settings"
                log.warning("%s: a new KV store replaces the old one, and its programs are compiled", why)
            self._drop_session()
            session = self._session = Session(self, config, sizes)  # pyright: ignore[reportArgumentType]
        session.engine.scheduler.record(self._journal)
        return session

    @contextmanager
    def _lending(self, config: ContinuousBatchingConfig, hints: WorkloadHints) -> Iterator[Session]:
        """The session for a manager; the manager keeps it if it puts itself into `_manager` meanwhile."""
        with self._exclusive():
            yield self._session_for(config, hints, hints, open_ended=True)

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """Around new `params`.

        Raises:
          RuntimeError: requests of a manager run with the old ones.
        """
        manager = self._manager
        if manager is None:
            yield
        else:
            with manager._idle():
                yield
