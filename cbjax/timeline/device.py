"""When the device worked on a step, as far as the host can see it without another thread.

A step's outputs are asked whether they are ready (`jax.Array.is_ready`, which does not wait) at the ends of host phases
and before the host reads. The device runs steps in the order of their dispatch, since each takes the KV store that the
one before left, so the oldest stands for all. A read that had to wait ends when the outputs are there and copied.

A step's *device interval* goes from the end of its dispatch, or the moment the step before was seen ready if that is
later, to the moment it was itself seen ready. It is late by at most the host phase, or the pause of the caller between
two steps, in which the device finished. The *sure* part of it ends when the outputs were last seen not to be ready.
The interval of a step that is ready at the first look begins with its dispatch, in which it may have run, and no part
of it is sure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np


class DeviceStep:
    """Attributes:
    sent_from, sent: begin and end of the dispatch.
    begin, end, sure: the device interval and the seconds that are sure; NaN until it was seen ready.
    """

    __slots__ = ("begin", "end", "is_ready", "not_ready", "sent", "sent_from", "sure")

    def __init__(self, sent_from: float, sent: float, is_ready: Callable[[], bool]) -> None:
        self.sent_from, self.sent, self.is_ready = sent_from, sent, is_ready
        self.not_ready: float | None = None  # when it was last seen so
        self.begin = self.end = self.sure = float("nan")


class DeviceTrack:
    """The steps that the device has, and when the last one before them was done."""

    def __init__(self) -> None:
        self._steps: deque[DeviceStep] = deque()
        self._done = float("-inf")

    def add(self, sent_from: float, sent: float, tokens: Any, now: float) -> DeviceStep:
        """A step was dispatched; `tokens` are an output of it."""
        step = DeviceStep(sent_from, sent, _question(tokens))
        self._steps.append(step)
        self.look(sent if isinstance(tokens, np.ndarray) else now)
        return step

    def look(self, now: float) -> None:
        """Sees which steps are ready."""
        while self._steps:
            step = self._steps[0]
            if not step.is_ready():
                step.not_ready = now
                return
            self._finish(step, now)

    def read(self, step: DeviceStep, end: float) -> None:
        """The host has read this step's answer; the last look came right before it began to."""
        if self._steps and self._steps[0] is step:  # so it waited
            step.not_ready = end
            self._finish(step, end)

    def _finish(self, step: DeviceStep, now: float) -> None:
        self._steps.popleft()
        step.is_ready = bool  # lets go of the outputs
        sent = step.sent_from if step.not_ready is None else step.sent
        step.begin, step.end = max(sent, self._done), now
        step.sure = 0.0 if step.not_ready is None else max(0.0, step.not_ready - step.begin)
        self._done = now

    def forget(self) -> None:
        """Nothing that was dispatched is waited for any more."""
        self._steps.clear()


def _question(tokens: Any) -> Callable[[], bool]:
    """What tells whether they are ready. NumPy arrays are, and what cannot tell is when it was read."""
    if isinstance(tokens, np.ndarray):
        return lambda: True
    return getattr(tokens, "is_ready", lambda: False)
