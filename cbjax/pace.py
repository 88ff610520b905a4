"""How many steps a window may have: as many as fit into the time that somebody may be made to wait."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest measurement.
_NEWEST = 0.3


@dataclass(slots=True)
class Pace:
    """Attributes:
    max_window: steps of a window, at most.
    max_seconds: of a window, by the steps measured last; before the first one there are no windows.
    step_seconds: of a decode step; None: not measured.
    """

    max_window: int = 1
    max_seconds: float = 1.0
    step_seconds: float | None = None
    _last_read: float = 0.0

    def window(self) -> int:
        """Steps that the next window may have."""
        if self.max_window == 1 or self.step_seconds is None:
            return 1
        steps = self.max_seconds / max(self.step_seconds, 1e-9)
        return self.max_window if steps >= self.max_window else max(1, int(steps))

    def measure(self, steps: int, *, dispatched: float, read: float) -> None:
        """Decode steps whose answers were `read`, in seconds; with others in flight they began when those ended."""
        seconds = (read - max(dispatched, self._last_read)) / steps
        before = seconds if self.step_seconds is None else self.step_seconds
        self.step_seconds, self._last_read = before + _NEWEST * (seconds - before), read
