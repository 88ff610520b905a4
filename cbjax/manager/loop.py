"""The thread that runs the engine. It alone touches the engine from `start` to its end."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from cbjax.accounting import EngineStats
from cbjax.config import ContinuousBatchingConfig
from cbjax.engine import Engine
from cbjax.manager.entry import Entry
from cbjax.manager.ledger import Ledger
from cbjax.requests import RequestState, RequestStatus
from cbjax.submission import output_of, submit, without_tokens

if TYPE_CHECKING:
    from cbjax.mixin import ContinuousMixin
    from cbjax.session import Session

log = logging.getLogger(__name__)

# How long the interpreter's exit waits for a step (or a compiler) that is running, in seconds.
_EXIT_SECONDS = 30.0
_RUNNING: set[Loop] = set()


class Phase(Enum):
    """Where a loop is in its life. RUNNING takes requests, and so does NEW: they wait for `start`."""

    NEW = auto()
    RUNNING = auto()
    STOPPING = auto()  # finishes what it has
    STOPPED = auto()


class Loop:
    """Attributes:
    phase: guarded by the ledger's lock, like the inbox.
    error: what ended the last run, if it was not `stop`.
    session: of the last run.
    """

    def __init__(self, lm: ContinuousMixin, ledger: Ledger, config: ContinuousBatchingConfig) -> None:
        self._lm, self._ledger, self._config = lm, ledger, config
        self._work = threading.Condition(ledger.lock)
        self._inbox: deque[Callable[[], None]] = deque()
        self._running: dict[int, Entry] = {}  # by the engine's uid
        self._cancel_all = self._exiting = False
        self._thread: threading.Thread | None = None
        self.phase = Phase.NEW
        self.error: BaseException | None = None
        self.session: Session | None = None

    @property
    def engine(self) -> Engine | None:
        return self.session.engine if self.session is not None else None

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self, session: Session) -> None:
        """Starts a thread over this session; the last one has ended."""
        session.engine.stats = EngineStats()
        session.engine.pace.max_seconds = self._config.max_window_latency
        session.use(self._lm.params)
        thread = threading.Thread(target=self._run, args=(session,), name="cbjax-manager", daemon=True)
        with self._ledger.lock:
            thread.start()  # it waits for the lock
            self._thread, self.session, self.error, self._cancel_all = thread, session, None, False
            self.phase, self._ledger.is_open = Phase.RUNNING, True
            _RUNNING.add(self)

    def stop(self, *, cancel_all: bool) -> None:
        """Asks the thread to end."""
        with self._work:
            if self.phase is Phase.RUNNING:
                self.phase = Phase.STOPPING
            self._cancel_all |= cancel_all
            self._work.notify()

    def stop_at_exit(self) -> None:
        """Ends the thread without a word, since the interpreter exits."""
        self._exiting = True
        self.stop(cancel_all=True)
        self.join(_EXIT_SECONDS)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread's end; whether it has come."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    # Commands: posted by any thread with the lock held, run by the loop's.

    def post_submit(self, entry: Entry) -> None:
        self._post(partial(self._submit, entry))

    def post_cancel(self, entry: Entry) -> None:
        self._post(partial(self._cancel, entry))

    def post_tell(self, entry: Entry) -> None:
        self._post(partial(self.tell, entry))

    def post_new_params(self) -> None:
        self._post(self._adopt_params)

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._work.notify()

    def _submit(self, entry: Entry) -> None:
        engine = self.engine
        assert engine is not None
        if entry.cancelled:
            return
        self._adopt_params()
        try:
            state = submit(
                engine,
                entry.prepared,
                seed=entry.seed,
                eos_token_ids=self._lm.eos_token_ids,
                logprobs=self._config.return_logprobs,
                created=entry.created,
                fork_of=entry.relative,
            )
        except (TypeError, ValueError) as error:
            log.warning("request %s is refused: %s", entry.request_id, error)
            self._ledger.finish(entry, without_tokens(entry.prepared, RequestStatus.FAILED, str(error)))
            self.tell(entry)
        else:
            entry.state = state
            self._running[state.uid] = entry

    def _cancel(self, entry: Entry) -> None:
        """By the request's own record, never by its id, which may be another's by now."""
        state, engine = entry.state, self.engine
        if state is not None and engine is not None and self._running.pop(state.uid, None) is not None:
            engine.cancel(entry.request_id)
        self.cancelled(entry)

    def cancelled(self, entry: Entry) -> None:
        """The terminal output of a cancelled request, if it has none yet."""
        if entry.output is None:
            error = "cancelled by cancel_request"
            self._ledger.finish(entry, entry.ended(RequestStatus.CANCELLED, error, self._lm.tokenizer))
        self.tell(entry)

    def _adopt_params(self) -> None:
        """New weights, while no request has any KV of the old ones."""
        if self.session is not None and not self.session.engine.alive:
            self.session.use(self._lm.params)

    def tell(self, entry: Entry) -> None:
        """Tells the entry's handler what it has not been told."""
        while entry.handler is not None and (output := self._ledger.next_for_handler(entry)) is not None:
            entry.handler(output)

    # The thread.

    def _run(self, session: Session) -> None:
        status, error = RequestStatus.CANCELLED, "the manager was stopped"
        try:
            self._serve(session.engine)
        except BaseException as problem:
            self.error = problem
            if not self._exiting:  # else the interpreter refuses threads and compilers, and nobody will read this
                log.error("the manager's loop ends, and its requests fail", exc_info=problem)
                status, error = RequestStatus.FAILED, f"the engine stopped: {str(problem) or repr(problem)}"
        self._end(session, status, error)

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._inbox or self.phase is Phase.STOPPING or not engine.is_idle)
                if self._cancel_all or (self.phase is Phase.STOPPING and not self._inbox and engine.is_idle):
                    self.phase = Phase.STOPPED
                    return
                commands = list(self._inbox)
                self._inbox.clear()
            for command in commands:
                command()
            if not engine.is_idle:
                self._deliver(engine.step())

    def _deliver(self, touched: Sequence[RequestState]) -> None:
        entries = [self._running[state.uid] for state in touched]
        outputs = {}
        for entry, state in zip(entries, touched, strict=True):
            if state.status >= RequestStatus.FINISHED:
                outputs[entry.index] = output_of(state, self._lm.tokenizer)
                del self._running[state.uid]
        self._ledger.publish(entries, outputs)
        for entry in entries:
            self.tell(entry)

    def _end(self, session: Session, status: RequestStatus, error: str) -> None:
        """Whatever ended the loop: the engine is empty, the model is free, every request and handler has its end."""
        with self._ledger.lock:
            self.phase = Phase.STOPPED
            left = list(self._ledger.unfinished.values())
        if left or not session.engine.is_idle or self.error is not None:
            self._empty(session, status, error)
        self._running.clear()
        self._lm._manager = None
        for entry in left:
            if entry.cancelled:
                self.cancelled(entry)
            else:
                self._ledger.finish(entry, entry.ended(status, error, self._lm.tokenizer))
        while not self._close():
            pass
        _RUNNING.discard(self)

    def _empty(self, session: Session, status: RequestStatus, error: str) -> None:
        try:
            session.engine.abort(status, status.name.lower(), error)
        except BaseException as problem:  # the device is lost: the next start makes a new store
            log.error("the KV store is given up", exc_info=problem)
            self._lm._give_up_session(session)
            self.session = None

    def _close(self) -> bool:
        """Tells handlers what is due; whether nothing was, and nobody can post any more."""
        with self._ledger.lock:
            due = self._ledger.due()
            if not due:
                self._inbox.clear()
                self._ledger.is_open = False
                self._ledger.news.notify_all()
                return True
        for entry in due:
            self.tell(entry)
        return False


def _stop_all() -> None:
    for loop in list(_RUNNING):
        loop.stop_at_exit()


# A manager that nobody stopped must neither hold up the interpreter's exit nor dispatch while it is taken down. The
# hook is the one that `concurrent.futures` uses, and comes before it: `atexit` comes when nothing can be compiled.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
