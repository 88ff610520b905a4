"""What the engine has to know of the machine, as data, so that every decision from it is a pure function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Attributes:
    platform: "cpu", "gpu" or "tpu".
    device: the device's name.
    free_bytes: memory that nobody uses yet, in bytes.
    source: where that number comes from.
    """

    platform: str
    device: str
    free_bytes: int
    source: str


def machine_facts() -> MachineFacts:
    """Asks the default device; one that does not report memory (CPU) is answered for by the operating system."""
    import jax
    import psutil

    device = jax.devices()[0]  # multi-device comes with sharded stores; this is the one place that assumes one
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free, source = stats["bytes_limit"] - stats.get("bytes_in_use", 0), "the device's memory statistics"
    else:
        free, source = psutil.virtual_memory().available, "the operating system (the device reports none)"
    return MachineFacts(platform=device.platform, device=device.device_kind, free_bytes=int(free), source=source)
