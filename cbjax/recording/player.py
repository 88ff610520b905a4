"""Feeds a recording to the scheduler again: the same plans, with no engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from cbjax.recording.digest import plan_digest
from cbjax.recording.inputs import Add, Cancel, Input, Journal, Renew, Reset, Schedule, Start, Update
from cbjax.recording.live import LiveScheduler
from cbjax.recording.reader import Recording, read_recording
from cbjax.scheduler import SchedulerState, StepOutputs, StepPlan, StepResults, schedule


class ReplayMismatch(ValueError):
    """The scheduler plans otherwise than was recorded, or the inputs do not belong to its plans.

    Attributes:
      step: steps replayed before.
      plan: the one that is not the recorded one; None if it is the inputs.
    """

    def __init__(self, message: str, *, step: int, plan: StepPlan | None = None) -> None:
        super().__init__(message)
        self.step, self.plan = step, plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ReplayedStep:
    """A step that computed something.

    Attributes:
      index: of the step in the recording, from 0.
      plan: equal to the recorded one.
      state: the scheduler's, with the plan's blocks taken.
      inputs: what came since the step before: starts, requests, cancels, answers, ...
      results: what its answers meant; None if they were not recorded.
    """

    index: int
    plan: StepPlan
    state: SchedulerState
    inputs: tuple[Input, ...]
    results: StepResults | None = None

    def __repr__(self) -> str:
        batch = self.plan.batch
        return f"ReplayedStep({self.index}: {batch.num_tokens} tokens in {batch.num_rows} rows)"


class Player:
    """A scheduler that is given inputs one by one.

    Attributes:
      scheduler: None before the first `Start`.
      in_flight: plans without answers, the oldest first.
      num_steps: plans so far that were not empty.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self.scheduler: LiveScheduler | None = None
        self.in_flight: deque[StepPlan] = deque()
        self.num_steps = 0

    def apply(self, given: Input) -> StepPlan | StepResults | None:
        """Gives the scheduler one input. Returns the plan of a `Schedule` and the results of an `Update`.

        Raises:
          ReplayMismatch: the answers of an `Update` are not those of a plan in flight.
          Whatever the scheduler raises.
        """
        if isinstance(given, Start):
            self.scheduler = LiveScheduler(given.config)
            self.scheduler.record(self._journal)
            self.in_flight.clear()
            return None
        scheduler = self.scheduler
        assert scheduler is not None, "a recording begins with a start"
        match given:
            case Add(request=request):
                scheduler.add(request)
            case Cancel(uid=uid):
                scheduler.cancel(uid)
            case Schedule(digest=None):
                if self._journal is not None:
                    self._journal(given)
                schedule(scheduler.state, given.max_window)  # raises again, unless it was interrupted
            case Schedule():
                return self._schedule(scheduler, given.max_window)
            case Update():
                return self._update(scheduler, given)
            case Renew():
                scheduler.renew()
            case Reset():
                scheduler.reset()
                self.in_flight.clear()
        return None

    def _schedule(self, scheduler: LiveScheduler, max_window: int) -> StepPlan:
        plan = scheduler.schedule(max_window)
        if not plan.is_empty:
            self.in_flight.append(plan)
            self.num_steps += 1
        return plan

    def _update(self, scheduler: LiveScheduler, given: Update) -> StepResults:
        answers = len(given.tokens)
        batch = self.in_flight[0].batch if self.in_flight else None
        if batch is None or batch.window * batch.num_rows != answers:
            planned = f"a plan of {batch.window * batch.num_rows}" if batch is not None else "no plan"
            message = f"after step {self.num_steps - 1}: {answers} rows were answered and {planned} is in flight"
            raise ReplayMismatch(message, step=self.num_steps)
        tokens = given.tokens.reshape(batch.window, -1)
        finite = np.ones(tokens.shape, bool) if given.finite is None else given.finite.reshape(tokens.shape)
        outputs = StepOutputs(tokens=tokens, logprobs=np.zeros(tokens.shape, np.float32), finite=finite)
        return scheduler.update(self.in_flight.popleft(), outputs)


def replay(recording: str | PathLike[str] | Recording) -> Iterator[ReplayedStep]:
    """Replays a recording; yields each step once its answers have been applied. Needs no model and no jax.

    Every plan is compared with the recorded one by its digest.

    Raises:
      OSError, RecordingError: as `cbjax.recording.read_recording`, at once.
      ReplayMismatch: plans are others from here on; the steps before were yielded.
      Whatever the scheduler itself raises, as it then did when it was recorded.
    """
    if not isinstance(recording, Recording):
        recording = read_recording(recording)
    return _replay(recording)


def _replay(recording: Recording) -> Iterator[ReplayedStep]:
    player, since = Player(), []
    waiting: deque[ReplayedStep] = deque()  # for their answers
    for number, given in enumerate(recording.inputs, start=1):
        if isinstance(given, Start | Reset):
            yield from waiting
            waiting.clear()
        try:
            answer = player.apply(given)
            if isinstance(given, Schedule) and isinstance(answer, StepPlan):
                _compare(answer, given, player)
        except Exception as error:
            yield from waiting
            error.add_note(f"{recording.name}: record {number}")
            raise
        if isinstance(answer, StepResults):
            yield replace(waiting.popleft(), results=answer)
        if isinstance(answer, StepPlan) and not answer.is_empty:
            assert player.scheduler is not None
            index, state = player.num_steps - 1, player.scheduler.state
            waiting.append(ReplayedStep(index=index, plan=answer, state=state, inputs=tuple(since)))
            since.clear()
        elif not isinstance(given, Schedule):
            since.append(given)
    yield from waiting


def _compare(plan: StepPlan, given: Schedule, player: Player) -> None:
    digest = plan_digest(plan)
    if digest != given.digest:
        step = player.num_steps if plan.is_empty else player.num_steps - 1
        empty = ", since nothing can run" if plan.is_empty else ""
        message = f"step {step}: the plan is not the recorded one{empty} (digest {digest}, recorded {given.digest})"
        raise ReplayMismatch(message, step=step, plan=plan)
