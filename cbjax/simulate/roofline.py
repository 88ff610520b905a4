"""A cost model from data sheets, for those who have no machine yet.

The roofline (Williams et al., CACM 2009): a step takes as long as its arithmetic or its memory traffic, whichever is
longer, and a fixed overhead. A program computes every token of its bucket, two operations per parameter, and reads the
weights once; the KV cells that its rows read come on top. No machine reaches its data sheet, so both limits are taken
times a fraction, `compute_efficiency` and `memory_efficiency`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cbjax.ladder import Ladder
from cbjax.simulate.cost import LinearCost


def _check_positive(name: str, values: dict[str, float]) -> None:
    for field, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{field} of {name} must be a positive number; got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator, as its maker describes it.

    Attributes:
      name: of the machine.
      flops: dense bfloat16 operations per second.
      bytes_per_second: of device memory.
      host_bytes_per_second: between device and host memory.
      compute_efficiency, memory_efficiency: fractions of the two that are reached, in (0, 1].
      overhead: seconds a step takes for anything else, the host's work included.
    """

    name: str
    flops: float
    bytes_per_second: float
    host_bytes_per_second: float
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    overhead: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive(self.name, {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"})
        for name in ("compute_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a fraction in (0, 1]; got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model, as far as its steps' times go.

    Attributes:
      name: of the model.
      parameters: that a token is multiplied with; of a mixture of experts only those in use.
      weight_bytes: read by every step.
      kv_bytes_per_token: keys and values of one token in all layers.
    """

    name: str
    parameters: float
    weight_bytes: float
    kv_bytes_per_token: float

    def __post_init__(self) -> None:
        _check_positive(self.name, {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"})


# Peaks without sparsity, from the makers' data sheets; host links are PCIe 4.0 and 5.0 x16 at 80% of their rate.
A100 = Hardware(name="A100 80GB SXM", flops=312e12, bytes_per_second=2.039e12, host_bytes_per_second=25e9)
H100 = Hardware(name="H100 SXM", flops=989e12, bytes_per_second=3.35e12, host_bytes_per_second=50e9)
TPU_V5E = Hardware(name="TPU v5e", flops=197e12, bytes_per_second=0.819e12, host_bytes_per_second=25e9)
TPU_V6E = Hardware(name="TPU v6e", flops=918e12, bytes_per_second=1.64e12, host_bytes_per_second=25e9)
HARDWARE: Mapping[str, Hardware] = {"a100": A100, "h100": H100, "tpu_v5e": TPU_V5E, "tpu_v6e": TPU_V6E}
# 32 layers with 8 KV heads of 128, all in bfloat16.
LLAMA_3_8B = ModelSize(name="Llama 3.1 8B", parameters=8.03e9, weight_bytes=16.06e9, kv_bytes_per_token=131_072)


def roofline(
    ladder: Ladder, *, block_size: int, hardware: Hardware = H100, model: ModelSize = LLAMA_3_8B
) -> LinearCost:
    """The cost of steps in a ladder's buckets on `hardware` running `model`; `block_size` in tokens."""
    compute = 2 * model.parameters / (hardware.flops * hardware.compute_efficiency)
    byte = 1 / (hardware.bytes_per_second * hardware.memory_efficiency)
    weights = model.weight_bytes * byte
    block_bytes = model.kv_bytes_per_token * block_size
    return LinearCost(
        buckets={b: hardware.overhead + max(weights, compute * b.tokens) for b in ladder.buckets},
        kv_read=model.kv_bytes_per_token * byte,
        offloaded=block_bytes / hardware.host_bytes_per_second,
        restored=block_bytes / hardware.host_bytes_per_second,
        copied=2 * block_bytes * byte,
    )
