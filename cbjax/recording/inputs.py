"""What the pure scheduler is given, as values. All that it does follows from these, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cbjax.scheduler import Request, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """`initial_state` of this config: an engine begins."""

    config: SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Add:
    """`add`, of a request that was accepted."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel:
    """`cancel`."""

    uid: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """`schedule`.

    Attributes:
      digest: of the plan, empty or not; None: there was none, since `schedule` raised or was interrupted.
      max_window: its argument.
    """

    digest: str | None = None
    max_window: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """`update` of the oldest plan in flight.

    Attributes:
      tokens: i32[window * rows], all rows of a step and then the next one's, 0 where a row draws nothing.
      finite: bool[window * rows]; None: all of them.
    """

    tokens: np.ndarray
    finite: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Renew:
    """`renew`: other weights compute from now on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reset:
    """`initial_state` again, after an abort: nobody is alive and nothing is in flight."""


type Input = Start | Add | Cancel | Schedule | Update | Renew | Reset
# Who is told each input, on the thread that runs the engine.
type Journal = Callable[[Input], object]
