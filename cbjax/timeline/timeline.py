"""`Timeline`: a run over time, for people and for https://ui.perfetto.dev."""

from __future__ import annotations

import time
from collections.abc import Callable
from os import PathLike

import numpy as np

from cbjax.paths import write_whole
from cbjax.strict import check_int
from cbjax.timeline.chrome import trace_lines
from cbjax.timeline.measures import BucketTimes, DeviceActivity, bucket_times, device_activity
from cbjax.timeline.recorder import Compilation, StepRecorder
from cbjax.timeline.stays import Stay
from cbjax.timeline.table import table

DEFAULT_MAX_STEPS = 65_536


class Timeline:
    """What every step was, and how long each part of it took on the host and on the device.

    `lm.timeline()` makes one. All of it can be used while the engine runs, by any thread. `print` shows a table.

    Attributes:
      max_steps: steps that are kept, and stays of requests in slots; of more, the oldest are dropped.
      recorder: what listens to the engine.
    """

    def __init__(self, *, max_steps: int = DEFAULT_MAX_STEPS, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` answers with seconds and never goes back.

        Raises:
          TypeError, ValueError: `max_steps` is no int of at least 1.
        """
        checked = check_int("max_steps", max_steps, minimum=1)
        assert checked is not None
        self.max_steps = checked
        self.recorder = StepRecorder(checked, clock)

    @property
    def num_steps(self) -> int:
        """Steps dispatched while it listened, those that were dropped included."""
        return self.recorder.num_steps

    @property
    def num_dropped(self) -> int:
        """Steps that had to make place for later ones."""
        return self.recorder.num_dropped

    @property
    def num_ended(self) -> dict[str, int]:
        """Requests that ended meanwhile, by reason: "stop", "length", "failed", "cancelled"."""
        return dict(self.recorder.num_ended)

    @property
    def steps(self) -> np.ndarray:
        """STEP[steps], a copy, in order of dispatch: times in seconds on the clock, NaN where it has not come to that.

        The fields are those of `cbjax.timeline.STEP`: begin and end of each host phase, the device interval (see
        `cbjax.timeline.device`), and counts: `blocks` held and requests `running` and `waiting` once the step was
        planned, `new_tokens` that it brought, `ended` requests since the last step's update, and so on.
        """
        return self.recorder.steps()

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of the programs; a step's `bucket` is an index into them."""
        return tuple(map(str, list(self.recorder.buckets)))

    @property
    def stays(self) -> list[Stay]:
        """Who was in which slot from when to when: those that ended and are kept, then those that go on."""
        return self.recorder.stays()

    @property
    def compilations(self) -> list[Compilation]:
        """The last programs that were compiled, warm-up included."""
        return list(self.recorder.compilations)

    @property
    def loose_phases(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of the last phases that led to no step: nobody could run, a drain was due, an abort."""
        return list(self.recorder.loose)

    @property
    def device_activity(self) -> DeviceActivity:
        """How much of the wall clock the device was at work, over the steps that are kept."""
        return device_activity(self.steps)

    def bucket_times(self) -> list[BucketTimes]:
        """Medians of each program's steps, in the order of their first use, then of all."""
        return bucket_times(self.steps, self.buckets)

    def __str__(self) -> str:
        return table(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it as a trace for https://ui.perfetto.dev. An existing file is replaced when the new one is complete.

        Raises:
          OSError: it cannot be written; nothing is left behind.
        """
        write_whole(path, trace_lines(self))
