"""The host phases of an engine, as its loop goes through them: for jax's profiler and for timelines."""

from __future__ import annotations

from typing import Any, Protocol

from jax.profiler import TraceAnnotation

from cbjax.requests import RequestState
from cbjax.scheduler import StepPlan, StepResults
from cbjax.step_record import PHASES, StepRecord


class StepListener(Protocol):
    """What a listener is told, all on the thread that runs the engine. `cbjax.timeline.Timeline` is one."""

    def begin(self, phase: int) -> None:
        """The phase `PHASES[phase]` begins; phases follow one another, none lies in another."""
        ...

    def end(self, phase: int) -> None:
        """It ends, as it was meant to or by an exception."""
        ...

    def dispatched(self, record: StepRecord, answer: Any) -> None:
        """A step is dispatched; `answer.tokens` can be read once the device has run it."""
        ...

    def updated(self, plan: StepPlan, results: StepResults) -> None:
        """The answers to that plan, the oldest in flight, are applied."""
        ...

    def ended(self, request: RequestState) -> None:
        """A request has its terminal state; an abort tells of each that was alive."""
        ...

    def aborted(self) -> None:
        """What was in flight is forgotten."""
        ...

    def compiled(self, name: str, seconds: float) -> None:
        """A program is ready; `seconds` were spent on tracing and compiling it."""
        ...


class Phase:
    """One host phase: `with` it around the work. Only while a profile runs is there an annotation."""

    __slots__ = ("_annotation", "_index", "_name", "_tracer")

    def __init__(self, tracer: Tracer, index: int) -> None:
        self._tracer, self._index, self._name = tracer, index, f"cbjax.{PHASES[index]}"
        self._annotation: TraceAnnotation | None = None

    def __enter__(self) -> None:
        if TraceAnnotation.is_enabled():
            self._annotation = TraceAnnotation(self._name)
            self._annotation.__enter__()
        for listener in self._tracer.listeners:
            listener.begin(self._index)

    def __exit__(self, *error: object) -> None:
        for listener in self._tracer.listeners:
            listener.end(self._index)
        if self._annotation is not None:
            self._annotation.__exit__(*error)
            self._annotation = None


class Tracer:
    """What an engine tells of its steps. One engine uses it at a time, and one thread.

    Attributes:
      listeners: who is told; replaced, never changed, so that any thread may do it while the engine runs.
      schedule, build, dispatch, account, read, update: the phases, each a `cbjax.<name>` in jax's profiler.
    """

    def __init__(self) -> None:
        self.listeners: tuple[StepListener, ...] = ()
        phases = (Phase(self, index) for index in range(len(PHASES)))
        self.schedule, self.build, self.dispatch, self.account, self.read, self.update = phases

    def add(self, listener: StepListener) -> None:
        """Tells this listener, too, from now on."""
        self.listeners = (*self.listeners, listener)

    def remove(self, listener: StepListener) -> None:
        """Tells it no more."""
        self.listeners = tuple(other for other in self.listeners if other is not listener)

    def dispatched(self, record: StepRecord, answer: Any) -> None:
        """See `StepListener`, as for the others."""
        for listener in self.listeners:
            listener.dispatched(record, answer)

    def updated(self, plan: StepPlan, results: StepResults) -> None:
        for listener in self.listeners:
            listener.updated(plan, results)

    def ended(self, request: RequestState) -> None:
        for listener in self.listeners:
            listener.ended(request)

    def aborted(self) -> None:
        for listener in self.listeners:
            listener.aborted()

    def compiled(self, name: str, seconds: float) -> None:
        for listener in self.listeners:
            listener.compiled(name, seconds)
