"""What the device did by jax's profiler: when anything ran on it, and for how long each kernel did."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """Attributes:
    wall: seconds of the call, by the host's clock.
    span: seconds from the first begin to the last end of what ran.
    busy: seconds in which anything ran; what ran at the same time counts once.
    kernels: seconds by name, most first.
    counts: runs by name.
    """

    wall: float
    span: float
    busy: float
    kernels: dict[str, float]
    counts: dict[str, int]

    def seconds_in(self, part: str) -> float:
        """Of all kernels with this in their name."""
        return sum(seconds for name, seconds in self.kernels.items() if part in name)


def traced(call: Callable[[], Any]) -> DeviceTrace | None:
    """The trace of a call, which has to wait for what it starts; None: the profiler saw no device."""
    options = jax.profiler.ProfileOptions()
    # The host's part is not looked at, and writing it down would slow it.
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            call()
            wall = time.perf_counter() - start
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read_trace(jax.profiler.ProfileData.from_file(str(file)), wall)


def read_trace(data: Any, wall: float) -> DeviceTrace | None:
    """What a `jax.profiler.ProfileData` holds of GPUs; None: nothing."""
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    # A plane also has lines of its modules and operations, which hold the same times once more.
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    kernels: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    intervals = []
    for event in (event for line in lines for event in line.events):
        intervals.append((event.start_ns, event.start_ns + event.duration_ns))
        kernels[event.name] += event.duration_ns * 1e-9
        counts[event.name] += 1
    if not intervals:
        return None
    busy, span = covered(intervals)
    most_first = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return DeviceTrace(wall=wall, span=span * 1e-9, busy=busy * 1e-9, kernels=most_first, counts=dict(counts))


def covered(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Length of the union of some intervals, and of what lies between the first begin and the last end."""
    ordered = sorted(intervals)
    first, reached = ordered[0]
    total = reached - first
    for begin, end in ordered[1:]:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total, reached - first
