"""Kernels at the sizes of a model: what to compile, and how its loops and bytes are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.bundles import Trips
from pallas_kernels.paged_attention import KVLayout, Sizes, paged_attention
from pallas_kernels.paged_attention.tpu.chunks import Chunking
from pallas_kernels.paged_attention.tpu.costs import decode_bytes, decode_trips
from pallas_kernels.paged_attention.tpu.decode import Decode

OPS = ("paged_attention",)
PHASES = ("decode",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel's sizes; counts in tokens, rows and heads."""

    op: str = "paged_attention"
    phase: str = "decode"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    rows: int = 64
    context: int = 8192
    window: int | None = None
    soft_cap: float | None = None
    chunk: int = 1024
    vmem_limit_bytes: int = 100 << 20
    cores: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A case as a function of arrays.

    Attributes:
      kernel: how the names of its listings begin.
      function, arguments, donate: for `compile_for`.
      trips: of the kernel's loops.
      kv_tokens: tokens of keys and values that all rows read.
      kv_bytes: of these in the store.
      moved_bytes: between HBM and the core.
    """

    kernel: str
    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...]
    trips: tuple[Trips, ...]
    kv_tokens: int
    kv_bytes: int
    moved_bytes: int


def build(case: Case, *, vmem_limit_bytes: int | None = None) -> Built:
    """A case, with the limit it names or another.

    Raises:
      ValueError, NotImplementedError: there is no such kernel.
    """
    if case.op not in OPS or case.phase not in PHASES:
        raise NotImplementedError(
            f"kernels are {', '.join(OPS)} in the phases {', '.join(PHASES)}; got {case.op} in {case.phase}"
        )
    if case.kv_heads < 1 or case.heads % case.kv_heads:
        raise ValueError(f"kv heads must divide query heads; got {case.kv_heads} and {case.heads}")
    blocks = -(-case.context // case.block_size)
    layout = KVLayout(
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_blocks=case.rows * blocks,
        dtype=case.kv_dtype or case.dtype,
    )
    sizes = Sizes(chunk=case.chunk, vmem_limit_bytes=vmem_limit_bytes or case.vmem_limit_bytes, cores=case.cores)
    spec = Decode(
        chunking=Chunking(layout=layout, tokens=case.chunk, window=case.window),
        group=case.heads // case.kv_heads,
        soft_cap=case.soft_cap,
        cores=case.cores,
    )

    def function(*arrays: Any) -> Any:
        scales = dict(zip(("k_scales", "v_scales"), arrays[9:], strict=False))
        return paged_attention(
            *arrays[:9], window=case.window, soft_cap=case.soft_cap, single_token_rows=True, sizes=sizes, **scales
        )

    rows = case.rows // case.cores  # a core's
    moved = decode_bytes(spec, rows, case.context, jnp.dtype(case.dtype))
    return Built(
        kernel="paged_attention_decode",
        function=function,
        arguments=_arguments(case, layout, blocks),
        donate=(3,),
        trips=decode_trips(spec, case.rows, case.context),
        kv_tokens=rows * min(case.context, case.window or case.context),
        kv_bytes=moved["kv_read"],
        moved_bytes=sum(moved.values()),
    )


def _arguments(case: Case, layout: KVLayout, blocks: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = case.rows
    new = array(rows, case.kv_heads, case.head_dim, dtype=case.dtype)
    scales = (array(case.kv_heads, dtype=jnp.float32),) * 2 if jnp.dtype(layout.dtype).itemsize == 1 else ()
    return (
        array(rows, case.heads, case.head_dim, dtype=case.dtype),
        new,
        new,
        array(*layout.shape, dtype=layout.dtype),
        array(rows + 1, blocks),
        array(rows),
        array(rows + 1),
        array(rows),
        array(),
        *scales,
    )
