"""Paged attention as a function of arrays: its arguments are checked here, and computed with by the TPU kernels.

`paged_attention` is that of GPUs, too, whose own entrance is `pallas_kernels.paged_attention.gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.checks import check_arrays, check_options, check_rows
from pallas_kernels.paged_attention.tpu.attend import Sizes, attend
from pallas_kernels.paged_attention.tpu.layout import KVLayout
from pallas_kernels.paged_attention.tpu.plan import Plan, make_plan
from pallas_kernels.paged_attention.tpu.tuning import sizes_for

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.gpu import GpuSizes

type Backend = Literal["tpu", "gpu"]

# Query rows of a kv head that a varlen tile has at most.
MAX_TILE_ROWS = 512


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    single_token_rows: bool = False,
    sizes: Sizes | GpuSizes | None = None,
    backend: Backend | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes the rows' new keys and values into the store, then attends over it.

    Args:
      q: [tokens, heads, head_dim], float32 or bfloat16, on GPUs bfloat16 or float16; query head h reads kv head
        `h // (heads / kv_heads)`.
      k: [tokens, kv_heads, head_dim]; rounded to the store's dtype.
      v: [tokens, kv_heads, head_dim]; rounded to the store's dtype.
      kv: one layer's store, of the shape and dtype of its `KVLayout`, on GPUs its `GpuLayout`; donate it.
      table: i32[slots + 1, max_blocks], block ids, wide enough for every context, which is not checked.
      slot: i32[rows], row of `table` for each batch row.
      q_start: i32[rows + 1]; row r's new tokens are `q_start[r]` to `q_start[r + 1]`.
      context_len: i32[rows], tokens of the row in the store after the call; the new tokens are the last of them.
      num_rows: i32 scalar, real rows; the rest are padding, as is a row whose context is 0.
      scale: multiplies the scores; None is `head_dim ** -0.5`.
      window: a token sees itself and the `window - 1` tokens before it; None is the whole context.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
      sinks: [heads], a logit per head that takes part in the softmax's denominator and has no value.
      k_scales: f32[kv_heads]; keys are stored divided by them. With `v_scales`, for stores of 8 bits.
      v_scales: f32[kv_heads]; values are stored divided by them.
      single_token_rows: static promise that row r has the one token r; leaves the varlen part out.
      sizes: `GpuSizes` on GPUs, else `Sizes`; None: an H200's, and what was found best for a TPU (`tuning.sizes_for`).
      backend: whose kernels; None: those of the default device, a TPU's if it is neither.
      interpret: `InterpretParams` of Pallas's `tpu`, or `InterpretGPUParams` of its `mosaic_gpu`, to run on a CPU.

    Returns:
      out [tokens, heads, head_dim] in q's dtype, zeros for padding, and the new store.

    Raises:
      ValueError: shapes or dtypes that do not go together.
      NotImplementedError: sizes that the kernels have no form for.
    """
    if _is_gpu(backend):
        from pallas_kernels.paged_attention import gpu

        return gpu.paged_attention(
            q, k, v, kv, table, slot, q_start, context_len, num_rows, scale=scale, window=window, soft_cap=soft_cap,
            sinks=sinks, k_scales=k_scales, v_scales=v_scales, single_token_rows=single_token_rows,
            sizes=cast("GpuSizes | None", sizes), interpret=interpret or None,
        )  # fmt: skip
    layout = layout_of(q, k, v, kv)
    plan = plan_step(
        table, slot, q_start, context_len, num_rows, num_tokens=q.shape[0], group=q.shape[1] // k.shape[1],
        single_token_rows=single_token_rows,
    )  # fmt: skip
    return attend_planned(
        q, k, v, kv, plan, layout, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales,
        v_scales=v_scales, sizes=cast("Sizes | None", sizes), interpret=interpret,
    )  # fmt: skip


def plan_step(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    group: int,
    single_token_rows: bool = False,
) -> Plan:
    """What `attend_planned` needs to know of a step, once for all layers with as many query heads to a kv head.

    Raises:
      ValueError: shapes or dtypes that do not go together.
    """
    check_rows(table, slot, q_start, context_len, num_rows, num_tokens=num_tokens, single_token_rows=single_token_rows)
    return make_plan(
        table, slot, q_start, context_len, num_rows, num_tokens=num_tokens, tile=tile_for(num_tokens, group),
        single_token_rows=single_token_rows,
    )  # fmt: skip


def attend_planned(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    plan: Plan,
    layout: KVLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` with the plan and the layout made beforehand."""
    heads, head_dim = q.shape[1:]
    window = check_options(
        heads, layout.num_kv_heads, layout.dtype, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip
    return attend(
        q, k, v, kv, plan, layout, _checked(sizes) or sizes_for(layout, heads),
        scale=head_dim**-0.5 if scale is None else scale, window=window, soft_cap=soft_cap, sinks=sinks,
        k_scales=k_scales, v_scales=v_scales, interpret=interpret,
    )  # fmt: skip


def _is_gpu(backend: Backend | None) -> bool:
    if backend not in (None, "tpu", "gpu"):
        raise ValueError(f'backend must be "tpu", "gpu" or None; got {backend!r}')
    return (backend or jax.default_backend()) == "gpu"


def _checked(sizes: Sizes | None) -> Sizes | None:
    if not isinstance(sizes, Sizes | None):
        raise ValueError(f"sizes must be Sizes or None with the TPU kernels; got {sizes!r}")
    return sizes


def layout_of(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array) -> KVLayout:
    """The layout of a store, from the arrays that are used with it.

    Raises:
      ValueError: they do not go together.
      NotImplementedError: sizes that the kernels have no form for.
    """
    check_arrays(q, k, v, kv)
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernels compute with float32 and bfloat16; got q of {q.dtype}")
    layout = KVLayout(
        num_kv_heads=k.shape[1], head_dim=k.shape[2], block_size=kv.shape[2], num_blocks=kv.shape[0] - 2, dtype=kv.dtype
    )
    if kv.shape != layout.shape:
        raise ValueError(
            f"kv must be {list(layout.shape)} for {k.shape[1]} kv heads of {k.shape[2]} (see KVLayout); "
            f"got {list(kv.shape)}"
        )
    return layout


def tile_for(num_tokens: int, group: int) -> int:
    """Query tokens of a varlen tile: a power of two, as many as the batch has use for."""
    tile = 16
    while tile * 2 * group <= MAX_TILE_ROWS and tile < min(num_tokens, 256):
        tile *= 2
    return tile
