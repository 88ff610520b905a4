"""How far the host runs ahead of the device: decided once from settings and machine facts, and told with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from cbjax.config import ContinuousBatchingConfig
from cbjax.machine import MachineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Attributes:
    depth: steps in flight while the next one is planned; 0: none.
    why: that many.
    """

    depth: int
    why: str


def resolve_overlap(config: ContinuousBatchingConfig, machine: MachineFacts) -> Overlap:
    """Decides what was left open.

    Raises:
      ValueError: steps in flight were asked for where every dispatch waits for its step.
    """
    asked, depth = config.use_async_batching, config.async_depth
    if asked is None and depth is None:
        return _default(machine)
    if asked is False:
        return Overlap(depth=0, why="as asked")
    if not machine.dispatches_ahead:
        raise ValueError(
            "use_async_batching and async_depth need a device that is dispatched to without waiting; "
            f"{machine.device} is not, since jax_cpu_enable_async_dispatch is off: turn it on with "
            'jax.config.update("jax_cpu_enable_async_dispatch", True) before jax is used, or leave both at None'
        )
    return Overlap(depth=depth or 1, why="as asked")


def _default(machine: MachineFacts) -> Overlap:
    if not machine.dispatches_ahead:
        return Overlap(depth=0, why="every dispatch waits for its step (jax_cpu_enable_async_dispatch is off)")
    if machine.platform == "cpu":
        return Overlap(depth=0, why="on a CPU the host's work and the steps share the cores")
    return Overlap(depth=1, why="the host plans a step while the device computes the one before")
