"""Paged attention on GPUs as a function of arrays: its arguments are checked here, and computed with by the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.checks import check_arrays, check_options, check_rows, check_window
from pallas_kernels.paged_attention.gpu.attend import GpuSizes, attend
from pallas_kernels.paged_attention.gpu.layout import BLOCK_SIZES, GpuLayout
from pallas_kernels.paged_attention.gpu.plan import GpuPlan, make_plan
from pallas_kernels.paged_attention.gpu.varlen import ROWS, varlen_tile

Q_DTYPES = ("bfloat16", "float16")


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
    sizes: GpuSizes | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.paged_attention.paged_attention` on Hopper GPUs.

    Arguments and results are as there, apart from these:

    Args:
      q: of bfloat16 or float16.
      kv: one layer's store, of the shape and dtype of its `GpuLayout`: q's dtype or float8_e4m3fn; donate it.
      sizes: None: `GpuSizes()`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
      ValueError: shapes or dtypes that do not go together.
      NotImplementedError: sizes that the kernels have no form for.
    """
    layout, sizes = layout_of(q, k, v, kv), sizes or GpuSizes()
    plan = plan_step(
        table, slot, q_start, context_len, num_rows, num_tokens=q.shape[0], block_size=layout.block_size,
        kv_heads=k.shape[1], group=q.shape[1] // k.shape[1], windows=(window,), single_token_rows=single_token_rows,
        sizes=sizes,
    )  # fmt: skip
    return attend_planned(
        q, k, v, kv, plan, layout, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales,
        v_scales=v_scales, sizes=sizes, interpret=interpret,
    )  # fmt: skip


def plan_step(
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    kv_heads: int,
    group: int,
    windows: tuple[int | None, ...] = (None,),
    single_token_rows: bool = False,
    sizes: GpuSizes | None = None,
) -> GpuPlan:
    """What `attend_planned` needs to know of a step, once for all layers.

    Args:
      block_size: of their stores.
      kv_heads: of a layer, at least.
      group: query heads of a kv head, at most.
      windows: all that the layers have.

    Raises:
      ValueError: shapes or dtypes that do not go together.
    """
    check_rows(table, slot, q_start, context_len, num_rows, num_tokens=num_tokens, single_token_rows=single_token_rows)
    sizes, windows = _checked(sizes), tuple(map(check_window, windows))
    if kv_heads < 1 or not 1 <= group <= ROWS:
        raise ValueError(f"kv_heads must be at least 1 and group from 1 to {ROWS}; got {kv_heads} and {group}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}; got {block_size}")
    return make_plan(
        table, slot, q_start, context_len, num_rows, num_tokens=num_tokens, block_size=block_size,
        target_items=sizes.target_items(kv_heads), varlen_tile=varlen_tile(group), windows=windows,
        span=sizes.span, single_token_rows=single_token_rows,
    )  # fmt: skip


def attend_planned(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    plan: GpuPlan,
    layout: GpuLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    sizes: GpuSizes | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` with the plan and the layout made beforehand."""
    heads, head_dim = q.shape[1:]
    window = check_options(
        heads, layout.num_kv_heads, layout.dtype, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip
    if interpret is not None and not isinstance(interpret, plgpu.InterpretGPUParams):
        raise ValueError(f"interpret must be None or InterpretGPUParams with the GPU kernels; got {interpret!r}")
    if layout.block_size != plan.block_size:
        raise ValueError(f"the plan is of blocks of {plan.block_size} tokens; got a store of {layout.block_size}")
    if window not in plan.windows:
        raise ValueError(f"window must be one of the plan's, {plan.windows}; got {window}")
    return attend(
        q, k, v, kv, plan, layout, _checked(sizes), scale=head_dim**-0.5 if scale is None else scale,
        window=window, soft_cap=soft_cap, sinks=sinks, k_scales=k_scales, v_scales=v_scales, interpret=interpret,
    )  # fmt: skip


def _checked(sizes: GpuSizes | None) -> GpuSizes:
    if not isinstance(sizes, GpuSizes | None):
        raise ValueError(f"sizes must be GpuSizes or None with the GPU kernels; got {sizes!r}")
    return sizes or GpuSizes()


def layout_of(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array) -> GpuLayout:
    """The layout of a store, from the arrays that are used with it.

    Raises:
      ValueError: they do not go together.
      NotImplementedError: sizes that the kernels have no form for.
    """
    check_arrays(q, k, v, kv)
    if q.shape[1] // k.shape[1] > ROWS:
        raise NotImplementedError(
            f"the GPU kernels take at most {ROWS} query heads to a kv head; got {q.shape[1]} and {k.shape[1]}"
        )
    if jnp.dtype(q.dtype).name not in Q_DTYPES:
        raise NotImplementedError(f"the GPU kernels compute with {' and '.join(Q_DTYPES)}; got q of {q.dtype}")
    layout = GpuLayout(
        num_kv_heads=k.shape[1], head_dim=k.shape[2], block_size=kv.shape[2], num_blocks=kv.shape[0] - 2, dtype=kv.dtype
    )
    if jnp.dtype(kv.dtype).itemsize != 1 and kv.dtype != q.dtype:
        raise NotImplementedError(
            f"the GPU kernels take a store of q's dtype or of 8 bits; got {kv.dtype} and {q.dtype}"
        )
    if kv.shape != layout.shape:
        raise ValueError(
            f"kv must be {list(layout.shape)} for {k.shape[1]} kv heads of {k.shape[2]} (see GpuLayout); "
            f"got {list(kv.shape)}"
        )
    return layout
