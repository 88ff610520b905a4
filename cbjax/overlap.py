"""How far the host runs ahead of the device: decided once from settings and machine facts, and told with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from cbjax.config import ContinuousBatchingConfig
from cbjax.machine import MachineFacts

# Seconds of a window at most where nobody follows the tokens: so long an interrupt may go unheard.
UNWATCHED_SECONDS = 1.0
_ACCELERATOR_WINDOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Attributes:
    depth: dispatches in flight while the next one is planned; 0: none.
    window: decode steps of one dispatch, at most.
    why_depth, why_window: these.
    """

    depth: int
    window: int
    why_depth: str
    why_window: str


def resolve_overlap(config: ContinuousBatchingConfig, machine: MachineFacts) -> Overlap:
    """Decides what was left open.

    Raises:
      ValueError: steps in flight were asked for where every dispatch waits for its step.
    """
    depth, why_depth = _depth(config, machine)
    window, why_window = _window(config, machine)
    return Overlap(depth=depth, window=window, why_depth=why_depth, why_window=why_window)


def _depth(config: ContinuousBatchingConfig, machine: MachineFacts) -> tuple[int, str]:
    asked, depth = config.use_async_batching, config.async_depth
    if asked is False:
        return 0, "as asked"
    is_open = asked is None and depth is None
    if not machine.dispatches_ahead and not is_open:
        raise ValueError(
            "use_async_batching and async_depth need a device that is dispatched to without waiting; "
            f"{machine.device} is not, since jax_cpu_enable_async_dispatch is off: turn it on with "
            'jax.config.update("jax_cpu_enable_async_dispatch", True) before jax is used, or leave both at None'
        )
    if not is_open:
        return depth or 1, "as asked"
    if not machine.dispatches_ahead:
        return 0, "every dispatch waits for its step (jax_cpu_enable_async_dispatch is off)"
    if machine.platform == "cpu":
        return 0, "on a CPU the host's work and the steps share the cores"
    return 1, "the host plans a step while the device computes the one before"


def _window(config: ContinuousBatchingConfig, machine: MachineFacts) -> tuple[int, str]:
    asked = config.decode_window
    if config.max_blocks_per_request == 0:
        given = "not given: " if asked not in (None, 1) else ""
        return 1, f"{given}max_blocks_per_request=0 leaves the decode programs out"
    if asked is not None:
        return asked, "as asked" if asked > 1 else "off, as asked"
    if machine.platform == "cpu":
        return 1, "on a CPU a dispatch costs little beside a step"
    return _ACCELERATOR_WINDOW, "decode steps of one dispatch, while nobody waits or prefills"
