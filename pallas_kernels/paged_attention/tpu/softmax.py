"""One chunk of an online softmax: the arithmetic that decode and varlen share, so that their bits are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.tpu.layout import LANES

# Scores that count for nothing. Finite, so that a difference of two is no NaN.
MASKED = -1e30


def attend_chunk(
    state: tuple[jax.Array, jax.Array, jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array | None,
    *,
    scale: float | jax.Array,
    soft_cap: float | None,
    served: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state of some query rows of one head after one more chunk of keys and values.

    Sums stay apart by lane until the end, and a chunk's are added from the first 128 tokens to the last. So a chunk
    whose end is masked has the bits of a shorter one.

    Args:
      state: f32[rows, 128] running maximum, the same in every lane; f32[rows, 128] sums of weights, by lane;
        f32[rows, lanes] weighted values.
      q: [rows, lanes], k and v: [tokens, lanes]; of one dtype.
      visible: bool[rows, tokens]; None: all of them.
      scale: multiplies the scores.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      served: bool[rows, lanes], the rows that this is about, the same in every lane; others see nothing and keep their
        state, whatever is in the keys and values of those that see it. None: all of them.
    """
    maximum, weights, values = state
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    scores = scores * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores * (1.0 / soft_cap)) * soft_cap
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1, keepdims=True))
    chunk = jnp.exp(scores - new_maximum[:, :1])
    if served is not None:
        assert visible is not None
        chunk = jnp.where(visible, chunk, 0.0)  # of a row that saw nothing before, masked scores are the maximum
    keep = jnp.exp(maximum - new_maximum)
    weights = weights * keep
    for first in range(0, k.shape[0], LANES):
        weights = weights + chunk[:, first : first + LANES]
    mixed = lax.dot_general(
        chunk.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if served is not None:  # a weight of 0 does not make a NaN harmless
        mixed = jnp.where(served, mixed, 0.0)
    return new_maximum, weights, values * keep[:, :1] + mixed


def initial_weights(shape: tuple[int, ...]) -> jax.Array:
    """f32[..., 128] sums with one weight of 1 in lane 0: a sink's own, where the maximum begins as its logit."""
    return (lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) == 0).astype(jnp.float32)


def finish(weights: jax.Array, values: jax.Array) -> jax.Array:
    """f32[rows, lanes], the mean of the values; 0 where a row saw nothing, NaN where its sum of weights is one."""
    total = over_lanes(weights)
    return jnp.where(total == 0.0, 0.0, values / jnp.where(total == 0.0, 1.0, total))


def over_lanes(x: jax.Array) -> jax.Array:
    """f32[rows, 1], the sum over the lanes of each row."""
    return jnp.sum(x, axis=1, keepdims=True)
