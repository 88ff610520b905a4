"""The cut of each row: the smallest logit that top_k and top_p let through. No sort over the vocabulary.

A row keeps {x >= cut}, so what ties with the cut is kept. For top_k the cut is the k-th largest logit. For top_p it
is the largest v for which {x >= v} holds at least top_p of the mass that top_k left: a token is kept if and only if
the mass of the strictly likelier tokens falls short of that.

Most rows are decided by their `NUM_CANDIDATES` largest logits. The others are searched exactly, `TILE` rows at a
time, by halving the interval of float32 values that holds the cut. Which way a row goes depends on the row alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from cbjax.sampling.lanes import first_index, fold

NUM_CANDIDATES = 65
"""64, and the next one to show whether the 64th ties with more."""

TILE = 8
"""Rows searched together: few enough to stay in a CPU's cache, so that the cost follows the rows in need."""

_LEAF = 32
"""Tokens of the leaves among which candidates are sought; the fastest of 16, 32, 64 and 128 on CPU."""

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)


class Rows(NamedTuple):
    """Rows of logits, and how each is to be filtered.

    Attributes:
      blocks: f32[rows, blocks, lanes], the logits.
      peak: f32[rows], the largest logit.
      scale: f32[rows], what multiplies the logits: one over the temperature, never 0.
      top_k: f32[rows], a count (exact up to 2**24), 0 when off.
      top_p: f32[rows], 1 when off.
    """

    blocks: Array
    peak: Array
    scale: Array
    top_k: Array
    top_p: Array

    def scaled(self, logits: Array) -> Array:
        """Logits [rows, ...] after temperature, less the peak's: at most 0, and 0 at the peak."""
        trailing = (slice(None), *(None,) * (logits.ndim - 1))
        return (logits - self.peak[trailing]) * self.scale[trailing]

    def weights(self, logits: Array) -> Array:
        """Unnormalised probabilities of logits [rows, ...]; the peak has 1."""
        return jnp.exp(self.scaled(logits))

    def take(self, ids: Array) -> "Rows":
        """The rows `ids`; an id past the end reads the last row."""
        scalars = jnp.take(jnp.stack(self[1:], axis=1), ids, axis=0, mode="clip")
        return Rows(jnp.take(self.blocks, ids, axis=0, mode="clip"), *scalars.T)


def inverse(temperature: Array) -> Array:
    """One over the temperature; never a subnormal, which would be flushed to 0 and turn -inf into NaN."""
    return jnp.maximum(1.0 / temperature, _SMALLEST_NORMAL)


def cutoff(rows: Rows, vocab: int) -> Array:
    """The cut f32[rows]; -inf where both filters are off.

    Args:
      rows: those with a filter on must have a finite peak and no NaN.
      vocab: number of tokens, without the filling of the last block.
    """
    filtered = (rows.top_k > 0) | (rows.top_p < 1)
    alone = (rows.top_k == 0) & (rows.top_p < 1)
    total = lax.cond(jnp.any(alone), lambda: _total_mass(rows), lambda: jnp.zeros_like(rows.peak))
    cut, known = _among_candidates(rows, _candidates(rows.blocks, vocab), total, vocab)
    # The peak is always kept, whatever a cut that was read as 0 (see `_value`) may say.
    return jnp.minimum(_searched(rows, cut, filtered & ~known), rows.peak)


def _total_mass(rows: Rows) -> Array:
    return jnp.cumsum(fold(jnp.add, rows.weights(rows.blocks)), axis=1)[:, -1]


def _candidates(blocks: Array, vocab: int) -> Array:
    """The min(NUM_CANDIDATES, vocab) largest logits of each row, falling."""
    count = min(NUM_CANDIDATES, vocab)
    return lax.platform_dependent(
        blocks,
        cpu=lambda blocks: _largest_by_leaves(blocks, count),
        default=lambda blocks: _largest(blocks, count),
    )


def _largest(blocks: Array, count: int) -> Array:
    return lax.top_k(blocks.reshape(blocks.shape[0], -1), count)[0]


def _largest_by_leaves(blocks: Array, count: int) -> Array:
    """The same for a CPU, where `top_k` over the whole vocabulary takes twice as long.

    A leaf whose peak is not among the `count` largest peaks cannot hold one of the largest logits, but for equals.
    """
    leaves = blocks.reshape(blocks.shape[0], -1, _LEAF)
    if leaves.shape[1] > count:
        chosen = lax.top_k(fold(jnp.maximum, leaves), count)[1]
        # In vocabulary order: leaves by falling peaks would slow down the heap of the second top_k.
        leaves = jnp.take_along_axis(leaves, lax.sort(chosen, dimension=1)[:, :, None], axis=1)
    return _largest(leaves, count)


def _among_candidates(rows: Rows, values: Array, total: Array, vocab: int) -> tuple[Array, Array]:
    """The cut as far as the candidates tell, and whether they do: (f32[rows], bool[rows])."""
    count = values.shape[1]
    by_rank, by_mass = rows.top_k > 0, rows.top_p < 1

    def nth(place: Array) -> Array:
        return jnp.take_along_axis(values, jnp.clip(place, 0, count - 1)[:, None], axis=1)[:, 0]

    rank_cut = jnp.where(by_rank, nth(rows.top_k.astype(jnp.int32) - 1), -jnp.inf)
    eligible = values >= rank_cut[:, None]
    cumulative = jnp.cumsum(jnp.where(eligible, rows.weights(values), 0.0), axis=1)
    need = rows.top_p * jnp.where(by_rank, cumulative[:, -1], total)
    place = first_index(cumulative >= need[:, None])
    cut = jnp.where(by_mass, nth(place), rank_cut)
    if count == vocab:
        return cut, jnp.ones_like(by_rank)
    # The mass that top_k left is known if no tie reaches past the candidates.
    complete = jnp.where(by_rank, values[:, -1] < rank_cut, place < count)
    return cut, (rows.top_k <= count) & (~by_mass | complete)


def _searched(rows: Rows, cut: Array, needed: Array) -> Array:
    """`cut` with the rows that are `needed` searched exactly, TILE rows at a time."""
    count = cut.shape[0]
    ids = lax.sort(jnp.where(needed, lax.iota(jnp.int32, count), count))
    ids = jnp.pad(ids, (0, -count % TILE), constant_values=count)

    def search_tile(tile: Array, cut: Array) -> Array:
        chosen = lax.dynamic_slice(ids, (tile * TILE,), (TILE,))
        return cut.at[chosen].set(_search(rows.take(chosen), chosen < count), mode="drop")

    num_tiles = (jnp.sum(needed.astype(jnp.int32)) + (TILE - 1)) // TILE
    return lax.fori_loop(0, num_tiles, search_tile, cut)


def _search(rows: Rows, active: Array) -> Array:
    """The cut of each active row: by top_k, then by top_p over what that leaves."""
    lowest = jnp.min(jnp.where(rows.blocks > -jnp.inf, rows.blocks, jnp.inf), axis=(1, 2))

    def stage(number: Array, cut: Array) -> Array:
        by_mass = number == 1
        eligible = rows.blocks >= cut[:, None, None]
        weights = jnp.where(by_mass, jnp.where(eligible, rows.weights(rows.blocks), 0.0), 1.0)
        need = jnp.where(by_mass, rows.top_p * _sum(weights), rows.top_k)
        wanted = active & jnp.where(by_mass, rows.top_p < 1, rows.top_k > 0)
        return _halve(rows, weights, need, cut, wanted, by_mass)

    # A loop of two, because it compiles the search once.
    return lax.fori_loop(0, 2, stage, lowest)


def _sum(values: Array) -> Array:
    return jnp.sum(fold(jnp.add, values), axis=1)


def _halve(rows: Rows, weights: Array, need: Array, lowest: Array, wanted: Array, by_mass: Array) -> Array:
    """The largest v for which the weights of {x >= v} sum to `need`; it is at least `lowest`.

    The lower bound satisfies that and the upper one does not; both are float32 values as integers of the same
    order, so 32 steps always do. A row is done earlier if the weight between its bounds is that of one token.
    """

    def is_open(bounds: Array, masses: Array) -> Array:
        least = jnp.where(by_mass, rows.weights(_value(bounds[0])), 1.0)
        # Where a token weighs less than the rounding of the sums, only the bounds themselves can tell.
        single = (masses[0] - masses[1] < 1.5 * least) & (least > 1e-5 * masses[0])
        return wanted & (bounds[1] - bounds[0] > 1) & ~single

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        unsettled, bounds, masses = state
        middle = bounds[0] + (bounds[1] - bounds[0]) // 2
        mass = _sum(jnp.where(rows.blocks >= _value(middle)[:, None, None], weights, 0.0))
        enough = mass >= need
        moves = jnp.stack([enough, ~enough]) & unsettled[None, :]
        bounds = jnp.where(moves, middle[None, :], bounds)
        masses = jnp.where(moves, mass[None, :], masses)
        return is_open(bounds, masses), bounds, masses

    bounds = jnp.stack([_key(lowest), _key(rows.peak) + 1])
    masses = jnp.stack([jnp.full_like(need, jnp.inf), jnp.zeros_like(need)])
    state = (is_open(bounds, masses), bounds, masses)
    return _value(lax.while_loop(lambda state: jnp.any(state[0]), narrow, state)[1][0])


def _key(value: Array) -> Array:
    """f32 to u32 in the same order."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31 != 0, ~bits, bits | jnp.uint32(0x80000000))


def _value(key: Array) -> Array:
    """The inverse of `_key`, but for subnormal numbers: they read as 0, as comparisons on some devices take them."""
    bits = jnp.where(key >> 31 != 0, key & jnp.uint32(0x7FFFFFFF), ~key)
    value = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.abs(value) < _SMALLEST_NORMAL, 0.0, value)
