"""The GPU kernels put together: the update, then decode and varlen over the store that it left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.decode import COLUMNS, Decode, decode
from pallas_kernels.paged_attention.gpu.layout import GpuLayout, pad_columns
from pallas_kernels.paged_attention.gpu.merge import merge
from pallas_kernels.paged_attention.gpu.plan import TILE, GpuPlan
from pallas_kernels.paged_attention.gpu.ring import Ring
from pallas_kernels.paged_attention.gpu.softmax import LOG2E, MASKED
from pallas_kernels.paged_attention.gpu.update import kv_update
from pallas_kernels.paged_attention.gpu.varlen import READERS, ROWS, Varlen, varlen
from pallas_kernels.paged_attention.scaling import head_factors, rounded

# Of a multiprocessor, without what the system takes for each of the programs that it may run, in bytes.
SHARED_BYTES = 226 * 1024
# Of it, for barriers, and for sums over the warps of a warpgroup.
BESIDE_BYTES = 4 * 1024
# More stages than this hide nothing more.
MOST_STAGES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSizes:
    """What tuning chooses.

    Attributes:
      multiprocessors: of the device: 132 of an H200, 114 of an H100 PCIe.
      decode_programs: that run at a time on each of them; fewer where their rings do not fit.
      items_per_program: decode items, each with one kv head, that there are about for each program.
      span: tokens of a decode item, so that a row's bits do not depend on the others; None lets the step decide.
    """

    multiprocessors: int = 132
    decode_programs: int = 2
    items_per_program: int = 4
    span: int | None = None

    def __post_init__(self) -> None:
        for name in ("multiprocessors", "decode_programs", "items_per_program"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.span is not None and (self.span < TILE or self.span % TILE):
            raise ValueError(f"span must be a multiple of {TILE}; got {self.span}")

    def target_items(self, kv_heads: int) -> int:
        """Decode items that a step is cut into, if it has as much to read."""
        return max(1, self.multiprocessors * self.decode_programs * self.items_per_program // kv_heads)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    plan: GpuPlan,
    layout: GpuLayout,
    sizes: GpuSizes,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` for a plan made beforehand; arguments are valid."""
    tokens, heads, head_dim = q.shape
    group = heads // layout.num_kv_heads
    factors = head_factors(scale, k_scales, v_scales, layout.num_kv_heads)
    logits = _sink_logits(sinks, layout.num_kv_heads, group)
    new = layout.join(rounded(k, k_scales, layout.dtype), rounded(v, v_scales, layout.dtype))
    kv = kv_update(
        layout, plan.token_block, plan.token_offset, new, kv,
        programs=min(tokens, sizes.multiprocessors), interpret=interpret,
    )  # fmt: skip
    padded = pad_columns(q, layout.width).reshape(tokens, layout.num_kv_heads, group, layout.width)

    alone = plan.varlen is None
    rows = padded if alone else padded[plan.decode_token]
    spec = _decode_spec(layout, group, q.dtype, soft_cap, sizes)
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, spec.columns - group), (0, 0)])
    items = plan.decodes[plan.windows.index(window)]
    parts, sums = decode(spec, items, rows, factors, plan.table, kv, interpret=interpret)
    columns = jnp.pad(logits, [(0, 0), (0, spec.columns - group)], constant_values=MASKED)
    merged = merge(items.row_items, parts, sums, columns, q.dtype, interpret=interpret)
    out = merged.swapaxes(2, 3)[:, :, :group, :head_dim].reshape(-1, heads, head_dim)
    if plan.varlen is None:
        return out, kv
    mixed = _varlen(padded, kv, plan, layout, sizes, window, soft_cap, factors, logits, interpret)
    mixed = mixed[..., :head_dim].reshape(tokens, heads, head_dim)
    is_decoded = (plan.token_row >= 0)[:, None, None]
    return jnp.where(is_decoded, out[jnp.maximum(plan.token_row, 0)], mixed), kv


def _varlen(
    q: jax.Array, kv: jax.Array, plan: GpuPlan, layout: GpuLayout, sizes: GpuSizes, window: int | None,
    soft_cap: float | None, factors: jax.Array, logits: jax.Array, interpret: Any,
) -> jax.Array:  # fmt: skip
    """[tokens, kv_heads, group, width], zeros for tokens of no item, from q of that shape."""
    items = plan.varlen
    assert items is not None
    tokens, heads, group, width = q.shape
    spec = _varlen_spec(
        layout, group, items.tile // READERS, q.dtype, window, soft_cap, sizes, is_interpreted=bool(interpret)
    )
    number, half = items.slot.shape[0], spec.tokens
    token = items.first[:, None] + jnp.arange(items.tile, dtype=jnp.int32)[None, :]
    tiles = q[jnp.minimum(token, tokens - 1)].reshape(number, READERS, half, heads, group, width)
    tiles = tiles.transpose(0, 3, 1, 2, 4, 5).reshape(number, heads, READERS, half * group, width)
    tiles = jnp.pad(tiles, [(0, 0)] * 3 + [(0, ROWS - half * group), (0, 0)])
    row_logits = jnp.tile(logits, (1, half))
    row_logits = jnp.pad(row_logits, [(0, 0), (0, ROWS - half * group)], constant_values=MASKED)
    out = varlen(spec, items, tiles, factors, row_logits, plan.table, kv, interpret=interpret)
    out = out[:, :, :, : half * group].reshape(number, heads, items.tile, group, width)
    chosen = out[jnp.maximum(items.token_item, 0), :, items.token_place]
    return jnp.where((items.token_item >= 0)[:, None, None, None], chosen, 0)


def _decode_spec(
    layout: GpuLayout, group: int, dtype: jax.typing.DTypeLike, soft_cap: float | None, sizes: GpuSizes
) -> Decode:
    """As many stages as fit beside the queries of two items and the weights, in as many programs as wanted."""
    stage = Ring(layout=layout, dtype=dtype, stages=1).stage_bytes
    beside = BESIDE_BYTES + 2 * -(-group // COLUMNS) * COLUMNS * (2 * layout.width + TILE)
    for programs in range(sizes.decode_programs, 0, -1):
        stages = (SHARED_BYTES // programs - beside) // stage
        if stages >= 3 or programs == 1:
            break
    if stages < 1:
        raise NotImplementedError(
            f"{group} query heads of {layout.head_dim} to a kv head do not fit a multiprocessor's memory"
        )
    return Decode(
        layout=layout,
        group=group,
        dtype=dtype,
        soft_cap=soft_cap,
        stages=min(stages, MOST_STAGES),
        programs=programs * sizes.multiprocessors,
    )


def _varlen_spec(
    layout: GpuLayout, group: int, tokens: int, dtype: jax.typing.DTypeLike, window: int | None, soft_cap: float | None,
    sizes: GpuSizes, *, is_interpreted: bool,
) -> Varlen:  # fmt: skip
    stage = Ring(layout=layout, dtype=dtype, stages=1).stage_bytes
    stages = (SHARED_BYTES - BESIDE_BYTES - 2 * READERS * ROWS * layout.width) // stage
    return Varlen(
        layout=layout,
        group=group,
        tokens=tokens,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
        stages=min(stages, MOST_STAGES),
        programs=sizes.multiprocessors,
        is_interpreted=is_interpreted,
    )


def _sink_logits(sinks: jax.Array | None, kv_heads: int, group: int) -> jax.Array:
    """f32[kv_heads, group], logits to base 2; `MASKED` where there is none."""
    if sinks is None:
        return jnp.full((kv_heads, group), MASKED, jnp.float32)
    return sinks.astype(jnp.float32).reshape(kv_heads, group) * LOG2E
