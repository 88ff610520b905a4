"""Takes down what an engine tells (`cbjax.tracing.StepListener`), at some microseconds a step.

The engine's thread tells; any thread may read, while the engine runs, too. Memory is bounded: the last `max_steps`
steps of `STEP.itemsize` bytes each, as many stays of requests in slots, and the last few of what is rare.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbjax.requests import RequestState
from cbjax.scheduler import Bucket, StepPlan, StepResults
from cbjax.step_record import PHASES, StepRecord
from cbjax.timeline.device import DeviceStep, DeviceTrack
from cbjax.timeline.layout import COUNTS, STEP, StepRing, counts_of
from cbjax.timeline.stays import Stay, StayTrack

_SCHEDULE, _BUILD, _DISPATCH, _ACCOUNT, _READ, _UPDATE = range(len(PHASES))
_NOTHING = [float("nan")] * (2 * len(PHASES))
_NEW_TOKENS, _ENDED = COUNTS.index("new_tokens"), COUNTS.index("ended")
# Compilations and phases without a step are few; this many of each are kept.
_MOST_EVENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A program that became ready at `end`, after `seconds` of tracing and compiling."""

    name: str
    end: float
    seconds: float


class _OpenStep:
    """A step in flight; `times` are those of `PHASES`, `counts` those of `COUNTS`."""

    __slots__ = ("counts", "device", "index", "plan", "times")

    def __init__(self, index: int, plan: StepPlan, times: list[float], counts: list[int], device: DeviceStep) -> None:
        self.index, self.plan, self.times, self.counts, self.device = index, plan, times, counts, device

    def all_times(self) -> list[float]:
        return [*self.times, self.device.begin, self.device.end, self.device.sure]


class StepRecorder:
    """See the module's docstring.

    Attributes:
      num_steps: dispatched while it listened.
      num_ended: requests that ended meanwhile, by reason.
      compilations: the last ones.
      loose: name, begin and end of the last phases that led to no step.
      buckets: the place of each in a step's `bucket`.
    """

    def __init__(self, max_steps: int, clock: Callable[[], float]) -> None:
        self.num_steps = 0
        self.num_ended: Counter[str] = Counter()
        self.compilations: deque[Compilation] = deque(maxlen=_MOST_EVENTS)
        self.loose: deque[tuple[str, float, float]] = deque(maxlen=_MOST_EVENTS)
        self.buckets: dict[Bucket, int] = {}
        self._clock = clock
        self._lock = threading.Lock()  # held for a step's last touch, and for reading all of them
        self._ring = StepRing(max_steps)
        self._open: deque[_OpenStep] = deque()
        self._phases = list(_NOTHING)  # begins and ends since they were last given to a step
        self._device, self._stays = DeviceTrack(), StayTrack(max_steps)
        self._ended = self._compiled = 0  # since they were last given to a step

    def begin(self, phase: int) -> None:
        """As in `StepListener`, like the other methods that the engine calls."""
        now = self._clock()
        if phase == _SCHEDULE:
            self._device.look(now)
            self._loosen()  # the one before was empty
        elif phase == _READ:
            self._device.look(now)
        self._phases[2 * phase] = now

    def end(self, phase: int) -> None:
        now = self._phases[2 * phase + 1] = self._clock()
        if phase < _READ:  # whose answers are read is known in `updated`
            self._device.look(now)

    def dispatched(self, record: StepRecord, answer: Any) -> None:
        times, self._phases = self._phases, list(_NOTHING)
        if times[0] != times[0]:  # the schedule began before anyone listened
            return
        bucket = self.buckets.setdefault(record.bucket, len(self.buckets))
        counts, self._compiled = counts_of(record, bucket=bucket, compiled=self._compiled), 0
        sent_from, sent, _, now = times[2 * _DISPATCH : 2 * _ACCOUNT + 2]
        device = self._device.add(sent_from, sent, answer.tokens, now)
        plan = record.plan
        with self._lock:
            self._open.append(_OpenStep(self.num_steps, plan, times, counts, device))
            self.num_steps += 1
            if plan.admitted or plan.soft_resets or plan.offloads:
                self._stays.dispatched(record, times[2 * _SCHEDULE + 1])

    def updated(self, plan: StepPlan, results: StepResults) -> None:
        _, read_end, _, now = self._phases[2 * _READ :]
        # Steps that were dispatched before anyone listened are not ours.
        step = self._open[0] if self._open and self._open[0].plan is plan else None
        if step is not None:
            self._device.read(step.device, read_end)
        self._device.look(now)
        if step is None:
            return
        step.counts[_NEW_TOKENS] = len(results.tokens)
        step.counts[_ENDED], self._ended = self._ended, 0
        self._stays.answered(results.uid, now)
        with self._lock:
            self._give_answer_phases(step)
            self._put_away()

    def ended(self, request: RequestState) -> None:
        self._ended += 1
        with self._lock:
            self.num_ended[request.finish_reason or "failed"] += 1
            self._stays.request_ended(request, self._clock())

    def aborted(self) -> None:
        self._device.forget()
        with self._lock:
            if self._open:
                self._give_answer_phases(self._open[0])
            while self._open:
                self._put_away()
        self._loosen()

    def compiled(self, name: str, seconds: float) -> None:
        self._compiled += 1
        self.compilations.append(Compilation(name=name, end=self._clock(), seconds=seconds))

    def _give_answer_phases(self, step: _OpenStep) -> None:
        step.times[2 * _READ :] = self._phases[2 * _READ :]
        self._phases[2 * _READ :] = _NOTHING[2 * _READ :]

    def _put_away(self) -> None:
        step = self._open[0]
        self._ring.append(step.index, step.all_times(), step.counts)
        self._open.popleft()

    def _loosen(self) -> None:
        """Phases before a dispatch that did not come to one belong to no step."""
        for phase in range(_READ):
            begin, end = self._phases[2 * phase : 2 * phase + 2]
            if begin <= end:
                self.loose.append((PHASES[phase], begin, end))
        self._phases[: 2 * _READ] = _NOTHING[: 2 * _READ]

    @property
    def num_dropped(self) -> int:
        """Steps that had to make place for later ones."""
        return max(0, self._ring.num_steps - self._ring.capacity)

    def steps(self) -> np.ndarray:
        """STEP[steps], in order of dispatch; those in flight have NaN for what is to come."""
        with self._lock:
            rows = self._ring.rows()
            in_flight = [(s.index, *s.all_times(), *s.counts) for s in self._open]
        return np.concatenate([rows, np.array(in_flight, STEP)]) if in_flight else rows

    def stays(self) -> list[Stay]:
        """Those that ended, as far as they are kept, then those that go on."""
        with self._lock:
            return self._stays.all()
