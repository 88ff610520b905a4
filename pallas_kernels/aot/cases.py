"""Kernels at the sizes of a model: what to compile, and how its loops and bytes are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.bundles import Trips
from pallas_kernels.aot.sizes import check_dtypes, check_sizes
from pallas_kernels.paged_attention import KVLayout, Sizes, paged_attention
from pallas_kernels.paged_attention.api import tile_for
from pallas_kernels.paged_attention.tpu.chunks import Chunking
from pallas_kernels.paged_attention.tpu.costs import decode_bytes, decode_trips
from pallas_kernels.paged_attention.tpu.decode import ROW_TILE, Decode
from pallas_kernels.paged_attention.tpu.layout import LANES
from pallas_kernels.paged_attention.tpu.plan import MOST_CORES
from pallas_kernels.paged_attention.tpu.update import kv_update
from pallas_kernels.paged_attention.tpu.update_costs import update_bytes, update_trips
from pallas_kernels.paged_attention.tpu.varlen import Varlen, varlen
from pallas_kernels.paged_attention.tpu.varlen_costs import items_of, varlen_bytes, varlen_trips

# Tokens; two of longer ones fit no VMEM, and take the compiler minutes.
_LONGEST_CHUNK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel's sizes; counts in tokens, rows and heads. Every row has `context` tokens, the new ones included.

    Attributes:
      new_tokens: of each row in prefill and in an update; decode has one.
    """

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
    new_tokens: int = 512
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
      kv_tokens: tokens of keys and values that are read, or in an update written; as often as they are.
      kv_bytes: of these in the store.
      moved_bytes: between HBM and the core.
      flops: multiplications and additions that the attention is, what is masked left out.
    """

    kernel: str
    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...]
    trips: tuple[Trips, ...]
    kv_tokens: int
    kv_bytes: int
    moved_bytes: int
    flops: int


def build(case: Case, *, vmem_limit_bytes: int | None = None) -> Built:
    """A case, with the limit it names or another.

    Raises:
      ValueError, NotImplementedError: there is no such kernel.
    """
    if case.op not in OPS or case.phase not in PHASES:
        raise NotImplementedError(
            f"kernels are {' and '.join(OPS)}, the first in the phases {' and '.join(PHASES)}; "
            f"got {case.op} in {case.phase}"
        )
    _check(case)
    make = _update if case.op == "kv_update" else PHASES[case.phase]
    if make is not _decode and not 1 <= case.new_tokens <= case.context:
        raise ValueError(f"a row has 1 to context ({case.context}) new tokens; got {case.new_tokens}")
    layout = KVLayout(
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_blocks=case.rows * _columns(case),
        dtype=case.kv_dtype or case.dtype,
    )
    return make(case, layout, vmem_limit_bytes or case.vmem_limit_bytes)


def _check(case: Case) -> None:
    """Raises ValueError for what the compiler would say less clearly, or take long to find."""
    counts = ("heads", "kv_heads", "head_dim", "block_size", "rows", "context", "new_tokens", "vmem_limit_bytes")
    check_sizes(**{name: getattr(case, name) for name in (*counts, "window", "soft_cap")})
    if case.chunk > _LONGEST_CHUNK:
        raise ValueError(f"a chunk has at most {_LONGEST_CHUNK} tokens; got {case.chunk}")
    if case.cores not in (1, MOST_CORES) or (case.cores > 1 and case.rows % (MOST_CORES * ROW_TILE)):
        raise ValueError(
            f"cores is 1, or {MOST_CORES} that share a multiple of {MOST_CORES * ROW_TILE} rows; got {case.cores} and "
            f"{case.rows} rows"
        )
    check_dtypes(dtype=case.dtype, kv_dtype=case.kv_dtype or case.dtype)
    if case.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"the TPU kernels compute with float32 and bfloat16; got {case.dtype}")


def _decode(case: Case, layout: KVLayout, vmem_limit_bytes: int) -> Built:
    sizes = Sizes(chunk=case.chunk, vmem_limit_bytes=vmem_limit_bytes, cores=case.cores)
    spec = Decode(
        chunking=Chunking(layout=layout, tokens=case.chunk, window=case.window),
        group=case.heads // case.kv_heads,
        soft_cap=case.soft_cap,
        cores=case.cores,
    )

    def function(*arrays: Any) -> Any:
        scales = dict(zip(("k_scales", "v_scales"), arrays[9:], strict=False))
        return paged_attention(
            *arrays[:9],
            window=case.window,
            soft_cap=case.soft_cap,
            single_token_rows=True,
            sizes=sizes,
            backend="tpu",
            **scales,
        )

    rows, seen = case.rows, min(case.context, case.window or case.context)
    new = _array(rows, case.kv_heads, case.head_dim, dtype=case.dtype)
    scales = (_array(case.kv_heads, dtype=jnp.float32),) * 2 if jnp.dtype(layout.dtype).itemsize == 1 else ()
    queries = _array(rows, case.heads, case.head_dim, dtype=case.dtype)
    store, table = _array(*layout.shape, dtype=layout.dtype), _array(rows + 1, _columns(case))
    moved = decode_bytes(spec, rows // case.cores, case.context, jnp.dtype(case.dtype))  # a core's
    return Built(
        kernel="paged_attention_decode",
        function=function,
        arguments=(queries, new, new, store, table, _array(rows), _array(rows + 1), _array(rows), _array(), *scales),
        donate=(3,),
        trips=decode_trips(spec, rows, case.context),
        kv_tokens=rows // case.cores * seen,
        kv_bytes=moved["kv_read"],
        moved_bytes=sum(moved.values()),
        flops=4 * case.head_dim * case.heads * rows // case.cores * seen,
    )


def _prefill(case: Case, layout: KVLayout, vmem_limit_bytes: int) -> Built:
    group, tokens = case.heads // case.kv_heads, case.rows * case.new_tokens
    spec = Varlen(
        chunking=Chunking(layout=layout, tokens=case.chunk, window=case.window),
        group=group,
        tile=tile_for(tokens, group),
        soft_cap=case.soft_cap,
        cores=case.cores,
    )
    padded = -(-tokens // spec.tile) * spec.tile
    tiles = items_of(spec, case.rows, case.new_tokens, case.context)
    most = len(tiles) + min(case.rows, tokens // 2)

    def function(*arrays: Any) -> Any:
        return varlen(spec, *arrays, vmem_limit_bytes=vmem_limit_bytes)

    moved = varlen_bytes(spec, tiles, case.context, jnp.dtype(case.dtype))
    return Built(
        kernel="paged_attention_varlen",
        function=function,
        arguments=(
            _array(padded // spec.tile + 1),
            *(_array(most),) * 4,
            _array(padded, case.heads * layout.lanes, dtype=case.dtype),
            _array(2, case.kv_heads, dtype=jnp.float32),
            _array(case.kv_heads, group, LANES, dtype=jnp.float32),
            _array(case.rows + 1, _columns(case)),
            _array(*layout.shape, dtype=layout.dtype),
        ),
        donate=(),
        trips=varlen_trips(spec, tiles),
        kv_tokens=sum(item.high - item.low for items in tiles for item in items),
        kv_bytes=moved["kv_read"],
        moved_bytes=sum(moved.values()),
        flops=4 * case.head_dim * case.heads * sum(item.pairs for items in tiles for item in items),
    )


def _update(case: Case, layout: KVLayout, vmem_limit_bytes: int) -> Built:
    tokens, rows = case.rows * case.new_tokens, _array(case.rows)

    def function(*arrays: Any) -> Any:
        return kv_update(layout, *arrays, vmem_limit_bytes=vmem_limit_bytes)

    moved = update_bytes(layout, case.rows, case.new_tokens, case.context)
    return Built(
        kernel="paged_attention_kv_update",
        function=function,
        arguments=(
            *(rows,) * 4,
            _array(tokens, layout.planes, layout.lanes, dtype=jnp.float32),
            _array(case.rows + 1, _columns(case)),
            _array(*layout.shape, dtype=layout.dtype),
        ),
        donate=(6,),
        trips=update_trips(layout, case.rows, case.new_tokens, case.context),
        kv_tokens=tokens,
        kv_bytes=moved["kv_written"],
        moved_bytes=sum(moved.values()),
        flops=0,
    )


OPS = ("paged_attention", "kv_update")
PHASES = {"decode": _decode, "prefill": _prefill}


def _columns(case: Case) -> int:
    return -(-case.context // case.block_size)


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
