"""One tile of an online softmax in base 2: the arithmetic that decode and varlen share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
# Scores that count for nothing. Finite, so that a difference of two is no NaN.
MASKED = -1e30
# Below it x - x**3 / 3 is tanh(x) to one in ten million.
NEAR_ZERO = 2.0**-5


def base2_scores(products: jax.Array, factor: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores in units of log2, from products of queries and keys.

    Args:
      products: f32[...].
      factor: f32 scalar that multiplies them.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
    """
    if soft_cap is None:
        return products * (factor * LOG2E)
    # The unit's own tanh is good to 11 bits, too few for a logit. Near 0 this one is a difference of two almost
    # equal numbers, so there its series stands in.
    share = products * (factor / soft_cap)
    power = jnp.exp2(share * (2.0 * LOG2E))
    capped = 1.0 - 2.0 / (power + 1.0)
    capped = jnp.where(jnp.abs(share) < NEAR_ZERO, share * (1.0 - share * share * (1.0 / 3.0)), capped)
    return capped * (soft_cap * LOG2E)


def next_weights(scores: jax.Array, maximum: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights of one more tile.

    Args:
      scores: f32[rows, columns] in units of log2, `MASKED` where nothing is seen.
      maximum: f32 of the other axis, of the tiles before.
      axis: along which a softmax runs.

    Returns:
      f32[rows, columns] weights, the new maximum, and the factor for what was added up before.
    """
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=axis))
    weights = jnp.exp2(scores - spread(new_maximum, scores.shape, axis))
    return weights, new_maximum, jnp.exp2(maximum - new_maximum)


def spread(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """x, a number for each place of the other axis, along `axis` of a matrix of this shape."""
    return lax.broadcast_in_dim(x, shape, [1 - axis])
