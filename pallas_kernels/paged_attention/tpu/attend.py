"""The TPU kernels put together: decode, the update of the other rows, and varlen, in that order, on one store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.scaling import head_factors, rounded
from pallas_kernels.paged_attention.tpu.chunks import Chunking
from pallas_kernels.paged_attention.tpu.decode import Decode, decode
from pallas_kernels.paged_attention.tpu.layout import LANES, KVLayout, pad_lanes
from pallas_kernels.paged_attention.tpu.plan import MOST_CORES, Plan
from pallas_kernels.paged_attention.tpu.softmax import MASKED
from pallas_kernels.paged_attention.tpu.update import kv_update
from pallas_kernels.paged_attention.tpu.varlen import Varlen, varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What tuning chooses.

    Attributes:
      chunk: tokens of keys and values that are fetched and computed with at a time; results depend on it in their last
        bits, and on nothing else here.
      vmem_limit_bytes: what the compiler may use; None: its default.
      cores: of the device, which share the work.
    """

    chunk: int = 1024
    vmem_limit_bytes: int | None = None
    cores: int = 1

    def __post_init__(self) -> None:
        if self.cores not in (1, MOST_CORES):
            raise ValueError(f"cores must be 1 or {MOST_CORES}; got {self.cores!r}")
        if self.vmem_limit_bytes is not None and self.vmem_limit_bytes < 1:
            raise ValueError(f"vmem_limit_bytes must be at least 1 or None; got {self.vmem_limit_bytes}")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    plan: Plan,
    layout: KVLayout,
    sizes: Sizes,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` for a plan made beforehand; arguments are valid."""
    tokens, heads, head_dim = q.shape
    kv_heads, lanes = layout.num_kv_heads, layout.lanes
    group = heads // kv_heads
    chunking = Chunking(layout=layout, tokens=sizes.chunk, window=window)
    options = {"interpret": interpret, "vmem_limit_bytes": sizes.vmem_limit_bytes}
    factors, logits = head_factors(scale, k_scales, v_scales, kv_heads), _sink_logits(sinks, kv_heads, group)
    new = layout.join(rounded(k, k_scales, layout.dtype), rounded(v, v_scales, layout.dtype))
    padded = pad_lanes(q, lanes)

    rows = plan.decode_token
    alone = plan.single_token_rows
    out, kv = decode(
        Decode(chunking=chunking, group=group, soft_cap=soft_cap, cores=sizes.cores),
        plan.next_row,
        plan.decode_slot,
        plan.decode_context,
        (_pad_rows(padded, rows.shape[0]) if alone else padded[rows]).reshape(-1, kv_heads, group, lanes),
        _pad_rows(new, rows.shape[0]) if alone else new[rows],
        factors,
        logits,
        plan.table,
        kv,
        **options,
    )
    out = out.reshape(-1, heads, lanes)
    if alone:
        return _values(out[:tokens], layout, head_dim), kv
    kv = kv_update(
        layout, plan.update_slot, plan.update_first, plan.update_stop, plan.update_offset, new.astype(jnp.float32),
        plan.table, kv, **options,
    )  # fmt: skip
    mixed = varlen(
        Varlen(chunking=chunking, group=group, tile=plan.tile, soft_cap=soft_cap, cores=sizes.cores),
        plan.tile_items,
        plan.item_slot,
        plan.item_first,
        plan.item_stop,
        plan.item_offset,
        _pad_rows(padded.reshape(tokens, heads * lanes), -(-tokens // plan.tile) * plan.tile),
        factors,
        logits,
        plan.table,
        kv,
        **options,
    )
    mixed = mixed[:tokens].reshape(tokens, heads, lanes)
    is_decoded = (plan.token_row >= 0)[:, None, None]
    mixed = jnp.where(is_decoded, out[jnp.maximum(plan.token_row, 0)], mixed)
    return _values(mixed, layout, head_dim), kv


def _sink_logits(sinks: jax.Array | None, kv_heads: int, group: int) -> jax.Array:
    """f32[kv_heads, group, 128], a logit in every lane; `MASKED` where there is none."""
    shape = (kv_heads, group, LANES)
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32)
    return jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, group, 1), shape)


def _pad_rows(x: jax.Array, count: int) -> jax.Array:
    return x if x.shape[0] == count else jnp.pad(x, [(0, count - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _values(out: jax.Array, layout: KVLayout, head_dim: int) -> jax.Array:
    """The part of the lanes that is the attention's output."""
    first = LANES // 2 if layout.is_packed else 0
    return out[..., first : first + head_dim]
