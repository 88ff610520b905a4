"""Row arithmetic over a vocabulary cut into blocks of lanes, with one fixed order of operations.

A row's bits must not depend on how many rows stand beside it. A library reduction may choose its order by the
shape of the whole array, so lanes are combined here by halving, element by element: always the same tree.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

LANES = 128
"""Tokens of one block; also the width of a TPU vector register."""


def to_blocks(logits: Array) -> Array:
    """[rows, vocab] as [rows, blocks, LANES]; the last block is filled with -inf, which nothing can draw."""
    rows, vocab = logits.shape
    filled = jnp.pad(logits, ((0, 0), (0, -vocab % LANES)), constant_values=-jnp.inf)
    return filled.reshape(rows, -1, LANES)


def take_block(blocks: Array, block: Array) -> Array:
    """One block of each row: [rows, blocks, lanes] and i32[rows] to [rows, lanes]."""
    # Not `take_along_axis`: on a TPU that copies all blocks.
    return jax.vmap(lambda row, index: lax.dynamic_index_in_dim(row, index, keepdims=False))(blocks, block)


def fold(combine: Callable[[Array, Array], Array], values: Array) -> Array:
    """[..., lanes] to [...] by halving; lanes is a power of two.

    With `jnp.maximum` a NaN reaches the result; XLA's own maximum reduction loses NaNs on CPU (jax 0.12).
    """
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = combine(values[..., :half], values[..., half:])
    return values[..., 0]


def first_index(hits: Array) -> Array:
    """The first true place of each row of bool[rows, places], or `places` where there is none; i32[rows].

    `argmax` says the same and is seven times slower on CPU. Places are counted in float32 (exact up to 2**24),
    whose minimum compiles and runs faster there than that of integers.
    """
    places = lax.broadcasted_iota(jnp.float32, hits.shape, 1)
    return jnp.min(jnp.where(hits, places, float(hits.shape[1])), axis=1).astype(jnp.int32)


def pick(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """Draws one place per row in proportion to its weight, by inverting the cumulative sum.

    Args:
      weights: f32[rows, places], not negative; every row has a positive one.
      uniform: f32[rows] in [0, 1).

    Returns:
      (place i32[rows], mass f32[rows]). The place has a positive weight: rounding can neither stop the search
      on a weight of zero nor carry it past the last positive one. The mass is the row's sum.
    """
    count = float(weights.shape[1])
    cumulative = jnp.cumsum(weights, axis=1)
    mass = cumulative[:, -1]
    beyond = cumulative > (uniform * mass)[:, None]
    places = lax.broadcasted_iota(jnp.float32, weights.shape, 1)
    # One maximum finds both the first place beyond the drawn mass, if any, and else the last possible one.
    rank = jnp.where(weights > 0, jnp.where(beyond, 2 * count - places, places), 0.0)
    best = jnp.max(rank, axis=1)
    return jnp.where(best >= count, 2 * count - best, best).astype(jnp.int32), mass
