"""Sizes of the kernels for a chip and a store."""

from __future__ import annotations

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.attend import Sizes
from pallas_kernels.paged_attention.tpu.chunks import SMALLEST_TAIL
from pallas_kernels.paged_attention.tpu.layout import KVLayout

# Larger chunks save nothing more: the matrix unit is as busy as it gets.
_LARGEST_CHUNK = 1024
# Shares of VMEM: of the two chunks, and of all that a kernel may take.
_CHUNKS_SHARE, _LIMIT_SHARE = 1 / 3, 7 / 8
# Where there is no TPU to ask, which only interpreting does.
_ANY_VMEM = 64 << 20


def vmem_bytes() -> int:
    """VMEM of a core of the TPU that is compiled for."""
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:
        return _ANY_VMEM


def default_sizes(layout: KVLayout, vmem: int | None = None) -> Sizes:
    """The largest chunk up to 1,024 tokens of which two take a third of VMEM."""
    vmem = vmem_bytes() if vmem is None else vmem
    chunk = max(SMALLEST_TAIL, layout.block_size)
    while chunk < _LARGEST_CHUNK and 2 * (2 * chunk) * layout.token_bytes <= vmem * _CHUNKS_SHARE:
        chunk *= 2
    return Sizes(chunk=chunk, vmem_limit_bytes=int(vmem * _LIMIT_SHARE))
