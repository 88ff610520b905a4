"""Scheduling policies: in which order candidates are offered the step's budgets.

Both policies serve active requests before waiting ones; they differ in whether decodes or half-done prefills go first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A policy as data: a name, the order of the active phases, the default admission reserve.

    Attributes:
      name: what `ContinuousBatchingConfig.scheduler_type` says.
      active_order: phases in the order in which they are offered budget; waiting requests always come last.
      default_safety_margin: fraction of the pool, in [0, 1], below which waiting requests are held back.
    """

    name: str
    active_order: tuple[Phase, Phase]
    default_safety_margin: float


class FIFOScheduler(Scheduler):
    """Active decodes, then active prefills, then waiting requests: work in flight is finished first."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(name="fifo", active_order=("decode", "prefill"), default_safety_margin=0.15)


class PrefillFirstScheduler(Scheduler):
    """Active prefills, then active decodes, then waiting requests: split prompts are completed first."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(name="prefill_first", active_order=("prefill", "decode"), default_safety_margin=0.0)


SCHEDULER_MAPPING: dict[str, Callable[[], Scheduler]] = {"fifo": FIFOScheduler, "prefill_first": PrefillFirstScheduler}


def scheduler_named(name: str) -> Scheduler:
    """The policy of that name.

    Raises:
      ValueError: no such policy.
    """
    if not isinstance(name, str) or name not in SCHEDULER_MAPPING:
        raise ValueError(f"scheduler_type must be one of {sorted(SCHEDULER_MAPPING)}; got {name!r}")
    return SCHEDULER_MAPPING[name]()
