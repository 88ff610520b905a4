"""Paged attention written down as it is defined: a token at a time, its whole context at once.

For looking things up and for comparison. Its temporaries are one token's context, its time a token's context for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cbjax.attention.batch import TokenPlaces
from cbjax.attention.xla import write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerBatch:
    """table: i32[tokens, max_blocks], each token's row of block ids; places: of the tokens."""

    table: jax.Array
    places: TokenPlaces

    @property
    def position(self) -> jax.Array:
        """i32[tokens], each token's place in its row; 0 for padding."""
        return self.places.position


def eager_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    batch: EagerBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results of `cbjax.attention.paged_attention`, with the index tables made beforehand."""
    kv = write_kv(kv, k, v, batch.places.write_index)
    kv_heads, head_dim = k.shape[1:]
    block_size, num_blocks = kv.shape[3], kv.shape[2] - 2
    factor = head_dim**-0.5 if scale is None else scale
    seen = jnp.arange(batch.table.shape[1] * block_size, dtype=jnp.int32)

    def attend(token: tuple[jax.Array, ...]) -> jax.Array:
        query, blocks, position, real = token
        visible = (seen <= position) & real
        if window is not None:
            visible &= seen > position - window
        # What is not seen is not read either: a weight of 0 does not make a NaN harmless.
        blocks = jnp.where(visible.reshape(-1, block_size).any(axis=1), blocks, num_blocks)
        keys, values = kv[:, :, blocks].reshape(2, kv_heads, -1, head_dim)
        values = jnp.where(visible[None, :, None], values, jnp.zeros((), values.dtype))
        query = query.reshape(kv_heads, -1, head_dim)
        keys = keys.astype(query.dtype)
        scores = factor * jnp.einsum("hgd,hkd->hgk", query, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible[None, None, :], scores, -1e30)
        logits = jnp.full((*scores.shape[:2], 1), -1e30) if sinks is None else sinks.reshape(*scores.shape[:2], 1)
        scores = jnp.concatenate([scores, logits.astype(jnp.float32)], axis=2)
        weights = jax.nn.softmax(scores, axis=2)[..., :-1]
        mixed = jnp.einsum("hgk,hkd->hgd", weights, values.astype(jnp.float32))
        return jnp.where(real, mixed, 0.0).reshape(-1, head_dim).astype(q.dtype)

    return jax.lax.map(attend, (q, batch.table, batch.places.position, batch.places.real)), kv
