"""The scheduler of an engine that runs: its state, and the one place where that changes."""

from __future__ import annotations

import numpy as np

from cbjax.recording.digest import plan_digest
from cbjax.recording.inputs import Add, Cancel, Journal, Renew, Reset, Schedule, Start, Update
from cbjax.scheduler import (
    Request,
    SchedulerConfig,
    SchedulerState,
    StepOutputs,
    StepPlan,
    StepResults,
    add,
    cancel,
    initial_state,
    num_cached,
    renew,
    schedule,
    update,
)


class LiveScheduler:
    """Applies the scheduler's pure functions to a state that it owns, and tells a journal each input.

    An input that changes nothing, since it is refused or the caller was interrupted, may be told or not, so after an
    interrupt only `reset` leads on.

    Attributes:
      state: never written, only replaced.
      journal: who is told; None: nobody, and then recording costs nothing.
    """

    __slots__ = ("journal", "state")

    def __init__(self, config: SchedulerConfig) -> None:
        self.state: SchedulerState = initial_state(config)
        self.journal: Journal | None = None

    def record(self, journal: Journal | None) -> None:
        """Tells `journal` every input from now on, instead of the one before; None: nobody.

        A recording begins with an empty state, so what the prefix cache holds is forgotten.

        Raises:
          RuntimeError: a request is alive or a step in flight.
          ValueError: the config cannot be recorded.
        """
        if journal is self.journal:
            return
        if journal is not None:
            if not self.state.is_idle:
                raise RuntimeError("a recording begins with an idle engine: wait for its requests, or cancel them")
            journal(Start(config=self.state.config))
            self.state = initial_state(self.state.config)
        self.journal = journal

    def add(self, request: Request) -> None:
        """Raises ValueError, and changes nothing, as `cbjax.scheduler.add`."""
        state = add(self.state, request)
        if self.journal is not None:
            self.journal(Add(request=request))
        self.state = state

    def check(self, request: Request) -> None:
        """Raises as `add` would. Changes nothing; any thread may call it."""
        add(self.state, request)

    def num_cached(self, request: Request) -> int:
        """Tokens of its prompt that the prefix cache has now. Changes nothing; any thread may call it."""
        return num_cached(self.state, request)

    def cancel(self, uid: int) -> bool:
        """Whether there was such a request."""
        if self.journal is not None:
            self.journal(Cancel(uid=uid))
        self.state, found = cancel(self.state, uid)
        return found

    def schedule(self, max_window: int = 1) -> StepPlan:
        """The next step, or a window of up to `max_window`; unless it is empty, it is in flight from now on."""
        try:
            plan, state = schedule(self.state, max_window)
        except BaseException:
            if self.journal is not None:  # so that a replay comes to the same error
                self.journal(Schedule(digest=None, max_window=max_window))
            raise
        if self.journal is not None:
            self.journal(Schedule(digest=plan_digest(plan), max_window=max_window))
        self.state = state
        return plan

    def update(self, plan: StepPlan, outputs: StepOutputs) -> StepResults:
        """Applies the answers to the oldest plan in flight."""
        if self.journal is not None:
            finite = None if outputs.finite.all() else outputs.finite.ravel()
            draws = np.arange(plan.batch.window)[:, None] < plan.batch.draws
            tokens = np.where(draws, outputs.tokens, 0).astype(np.int32)
            self.journal(Update(tokens=tokens.ravel(), finite=finite))
        self.state, results = update(self.state, plan, outputs)
        return results

    def renew(self) -> None:
        """Other weights compute from now on."""
        if self.journal is not None:
            self.journal(Renew())
        self.state = renew(self.state)

    def reset(self) -> None:
        """Back to the empty state, whatever was interrupted."""
        if self.journal is not None:
            self.journal(Reset())
        self.state = initial_state(self.state.config)
