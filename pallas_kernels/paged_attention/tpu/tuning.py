"""Sizes of the kernels for a chip and a store: from the table that `pallas_kernels.aot.tune` made, else by a rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.attend import Sizes
from pallas_kernels.paged_attention.tpu.chunks import SMALLEST_TAIL
from pallas_kernels.paged_attention.tpu.layout import KVLayout

# Larger chunks save nothing more: the matrix unit is as busy as it gets.
_LARGEST_CHUNK = 1024
# Shares of VMEM: of the two chunks, and of all that a kernel may take.
_CHUNKS_SHARE, _LIMIT_SHARE = 1 / 3, 7 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """What sizes depend on: the chip's name in the table, and VMEM and number of a device's cores."""

    name: str
    vmem_bytes: int
    cores: int


# Where there is none, which only interpreting does.
ANY_TPU = Tpu(name="none", vmem_bytes=64 << 20, cores=1)


def current_tpu() -> Tpu:
    """The TPU that is there, or that is compiled for."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return ANY_TPU
    name = str(info.chip_version)
    return Tpu(
        name=name if name.startswith("v") else f"tpu{name}", vmem_bytes=info.vmem_capacity_bytes, cores=info.num_cores
    )


def sizes_for(layout: KVLayout, heads: int, tpu: Tpu | None = None) -> Sizes:
    """Sizes for a store and a number of query heads."""
    tpu = current_tpu() if tpu is None else tpu
    key = (tpu.name, heads, layout.num_kv_heads, layout.head_dim, layout.block_size, jnp.dtype(layout.dtype).name)
    chunk = _tuned().get(key) or default_chunk(layout, tpu.vmem_bytes)
    return Sizes(chunk=chunk, vmem_limit_bytes=int(tpu.vmem_bytes * _LIMIT_SHARE), cores=tpu.cores)


def default_chunk(layout: KVLayout, vmem_bytes: int) -> int:
    """The largest chunk up to 1,024 tokens of which two take a third of VMEM."""
    chunk = max(SMALLEST_TAIL, layout.block_size)
    while chunk < _LARGEST_CHUNK and 2 * (2 * chunk) * layout.token_bytes <= vmem_bytes * _CHUNKS_SHARE:
        chunk *= 2
    return chunk


@functools.cache
def _tuned() -> dict[tuple[str | int, ...], int]:
    """Chunks by chip, heads, kv heads, width, block size and dtype."""
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    names = ("chip", "heads", "kv_heads", "head_dim", "block_size", "dtype")
    return {tuple(entry[name] for name in names): entry["chunk"] for entry in json.loads(text)}
