"""Numbers from recorded steps: how much of the time the device worked, and where the host's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbjax.step_record import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """Seconds of device intervals (see `cbjax.timeline.device`) within the wall clock of the same steps.

    Attributes:
      wall: from the first step's schedule to the end of the last update or device interval; pauses count.
      active: sum of the device intervals; no two overlap.
      sure: what of it is sure.
    """

    wall: float
    active: float
    sure: float

    @property
    def fraction(self) -> float:
        """Device-active fraction of wall clock; NaN without a step."""
        return self.active / self.wall if self.wall else float("nan")

    @property
    def sure_fraction(self) -> float:
        """What it is at least; NaN without a step."""
        return self.sure / self.wall if self.wall else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """Medians over the steps of one program.

    Attributes:
      name: the program's, or "all".
      steps: how many.
      rows, tokens: of a step; tokens computed.
      phases: seconds of each of `PHASES`.
      host: seconds of all phases but `read`, which waits for the device.
      device: seconds of the device interval.
    """

    name: str
    steps: int
    rows: float
    tokens: float
    phases: dict[str, float]
    host: float
    device: float


def device_activity(steps: np.ndarray) -> DeviceActivity:
    """Of STEP[steps]."""
    if not len(steps):
        return DeviceActivity(wall=0.0, active=0.0, sure=0.0)
    ends = np.concatenate([steps[name] for name in ("account_end", "update_end", "device_end")])
    return DeviceActivity(
        wall=float(np.nanmax(ends) - steps["schedule_begin"][0]),
        active=float(np.nansum(steps["device_end"] - steps["device_begin"])),
        sure=float(np.nansum(steps["device_sure"])),
    )


def bucket_times(steps: np.ndarray, buckets: Sequence[str]) -> list[BucketTimes]:
    """Of STEP[steps]: each program's in the order of `buckets`, then all steps'; none if there are no steps."""
    groups = [(name, steps[steps["bucket"] == index]) for index, name in enumerate(buckets)]
    return [_medians(name, group) for name, group in [*groups, ("all", steps)] if len(group)]


def _medians(name: str, steps: np.ndarray) -> BucketTimes:
    phases = {phase: steps[f"{phase}_end"] - steps[f"{phase}_begin"] for phase in PHASES}
    host = np.sum([seconds for phase, seconds in phases.items() if phase != "read"], axis=0)
    return BucketTimes(
        name=name,
        steps=len(steps),
        rows=_median(steps["rows"]),
        tokens=_median(steps["prefill_tokens"] + steps["decode_tokens"]),
        phases={phase: _median(seconds) for phase, seconds in phases.items()},
        host=_median(host),
        device=_median(steps["device_end"] - steps["device_begin"]),
    )


def _median(values: np.ndarray) -> float:
    """Of what is known; NaN if nothing is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
