"""Online softmax over chunks of keys and values, with the same bits however many queries are computed at once.

A token's result must not depend on the shape of the program that computes it. On CPU, XLA hands products, reductions
and the elementwise operations around them to one of several libraries depending on their size, and these round
differently. What is written here keeps to the forms that do not:

- The reference that is taken off the scores is a whole power of two. Rescaling what was summed before is then
  exact, so it makes no difference whether a multiplication and the addition after it are contracted into one rounding.
- Sums are products with ones, and values have a multiple of 64 columns (see `padded`): a reduction, or a product of
  another width, adds in an order that depends on the number of queries.
- A single query takes part twice, as a matrix of two rows (see `cbjax.attention.xla`).

A chunk that is masked in full changes nothing, exactly. Masked scores are finite: no arithmetic can make a NaN of them.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30
# Below any exponent of a score, and far enough from the ends of int32 for the difference of two.
_LOWEST = -(2**29)
# `jax.lax.dot_general` dimension numbers for [rows, kv_heads, ...] operands.
_LAST_LAST = (((3,), (3,)), ((0, 1), (0, 1)))
_LAST_FIRST = (((3,), (2,)), ((0, 1), (0, 1)))


class Softmax(NamedTuple):
    """What the chunks so far add up to, relative to `2 ** exponent`."""

    exponent: jax.Array  # i32[rows, kv_heads, queries, 1]
    total: jax.Array  # f32[rows, kv_heads, queries, 1], sum of the weights
    mixed: jax.Array  # f32[rows, kv_heads, queries, padded head_dim], weighted sum of the values


def padded(head_dim: int) -> int:
    """Columns that the values of a chunk must have: `head_dim` rounded up to a multiple of 64."""
    return -(-head_dim // 64) * 64


def start(shape: tuple[int, ...], sinks: jax.Array | None = None) -> Softmax:
    """State before the first chunk.

    Args:
        shape: of the queries, (rows, kv_heads, queries, head_dim).
        sinks: f32, broadcastable to [rows, kv_heads, queries, 1]; logits that have no value.
    """
    stats, mixed = (*shape[:3], 1), jnp.zeros((*shape[:3], padded(shape[3])), jnp.float32)
    if sinks is None:
        return Softmax(jnp.full(stats, _LOWEST, jnp.int32), jnp.zeros(stats, jnp.float32), mixed)
    sinks = jnp.broadcast_to(sinks / math.log(2), stats)
    exponent = _exponent(sinks)
    return Softmax(exponent, _power(sinks, exponent), mixed)


def add_chunk(
    state: Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    soft_cap: float | None,
) -> Softmax:
    """Adds one chunk of keys and values.

    Args:
        state: the chunks before.
        q: [rows, kv_heads, queries, head_dim].
        k: [rows, kv_heads, chunk, head_dim].
        v: [rows, kv_heads, chunk, padded head_dim], finite wherever a query's weight is 0.
        visible: bool, broadcastable to [rows, kv_heads, queries, chunk].
        scale: multiplies the scores.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
    """
    if q.dtype != k.dtype:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    scores = jax.lax.dot_general(q, k, _LAST_LAST, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores, scale = jnp.tanh(scores * (scale / soft_cap)), soft_cap
    scores = jnp.where(visible, scores * (scale / math.log(2)), MASKED)
    exponent = jnp.maximum(state.exponent, _exponent(jnp.max(scores, axis=-1, keepdims=True)))
    weights = _power(scores, exponent)
    ones = jnp.ones((*v.shape[:2], 2, v.shape[2]), jnp.float32)
    total = jax.lax.dot_general(weights, ones, _LAST_LAST, precision="highest")[..., :1]
    mixed = jax.lax.dot_general(weights, v.astype(jnp.float32), _LAST_FIRST)
    kept = _power_of_two(state.exponent - exponent)
    return Softmax(exponent, state.total * kept + total, state.mixed * kept + mixed)


def finish(state: Softmax, head_dim: int) -> jax.Array:
    """The result f32[rows, kv_heads, queries, head_dim]; zeros where nothing was visible."""
    return (state.mixed / jnp.where(state.total > 0, state.total, 1.0))[..., :head_dim]


def _exponent(scores: jax.Array) -> jax.Array:
    """The whole power of two at or above 2 ** scores."""
    return jnp.clip(jnp.ceil(scores), float(_LOWEST), float(-_LOWEST)).astype(jnp.int32)


def _power(scores: jax.Array, exponent: jax.Array) -> jax.Array:
    """2 ** (scores - exponent), at most 1; exactly 0 for a masked score."""
    return jnp.exp((scores - exponent.astype(jnp.float32)) * math.log(2))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2.0 ** exponent, exactly, for exponent i32 <= 0; 0 where that is below the normal numbers."""
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, -127) + 127) << 23, jnp.float32)
