"""What the engine has to know of the machine, as data, so that every decision from it is a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# In order of preference: a device copies to pinned memory without anybody's help.
_HOST_MEMORY_KINDS = ("pinned_host", "unpinned_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host that KV blocks can be moved to.

    Attributes:
      kind: the device's name for it; None: there is none, and NumPy arrays have to do.
      why: there is none.
    """

    kind: str | None = None
    why: str = "the device was not asked for its host memory"

    def __str__(self) -> str:
        if self.kind is not None:
            return f"{self.kind} memory, copied without waiting"
        return f"NumPy arrays, with a wait for each copy: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Attributes:
    platform: "cpu", "gpu" or "tpu".
    device: the device's name.
    capability: a GPU's compute capability, as "9.0".
    multiprocessors: of a GPU.
    free_bytes: memory that nobody uses yet, in bytes.
    source: where that number comes from.
    available_ram_bytes: main memory that nobody uses yet, in bytes; None: not known.
    host_memory: where blocks go that leave the device.
    dispatches_ahead: a program is dispatched without waiting for it.
    """

    platform: str
    device: str
    free_bytes: int
    source: str
    available_ram_bytes: int | None = None
    host_memory: HostMemory = HostMemory()
    dispatches_ahead: bool = True
    capability: str | None = None
    multiprocessors: int | None = None


def machine_facts() -> MachineFacts:
    """Asks the default device; one that does not report memory (CPU) is answered for by the operating system."""
    import jax
    import psutil

    device = jax.devices()[0]  # multi-device comes with sharded stores; this is the one place that assumes one
    stats = device.memory_stats() or {}
    ram = int(psutil.virtual_memory().available)
    if "bytes_limit" in stats:
        free, source = stats["bytes_limit"] - stats.get("bytes_in_use", 0), "the device's memory statistics"
    else:
        free, source = ram, "the operating system (the device reports none)"
    return MachineFacts(
        platform=device.platform,
        device=device.device_kind,
        free_bytes=int(free),
        source=source,
        available_ram_bytes=ram,
        host_memory=host_memory(device),
        dispatches_ahead=device.platform != "cpu" or bool(jax.config.read("jax_cpu_enable_async_dispatch")),
        capability=getattr(device, "compute_capability", None) if device.platform == "gpu" else None,
        multiprocessors=getattr(device, "core_count", None) if device.platform == "gpu" else None,
    )


def host_memory(device: Any) -> HostMemory:
    """The kind of host memory of a `jax.Device`: the first that it has and can copy to."""
    import jax
    import numpy as np

    try:
        kinds = [memory.kind for memory in device.addressable_memories()]
    except (NotImplementedError, RuntimeError) as error:
        return HostMemory(why=f"the device does not name its memories ({_first_line(error)})")
    why = f"the device has no host memory (only {', '.join(kinds)})"
    for kind in [kind for kind in _HOST_MEMORY_KINDS if kind in kinds]:
        try:
            # One that is listed need not work.
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            jax.device_put(np.zeros(1, np.float32), place).block_until_ready()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            why = f"a copy to {kind} memory failed ({_first_line(error)})"
        else:
            return HostMemory(kind=kind)
    return HostMemory(why=why)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120] or type(error).__name__
