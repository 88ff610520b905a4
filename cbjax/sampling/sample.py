"""Chooses one token per row, on the device.

Every row is on its own: its token, logprob and finite flag depend, bit for bit, on its logits, its words and its
output index, and not on the number of rows, its place among them or what the others ask for.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from cbjax.sampling.cutoff import Rows, cutoff, inverse
from cbjax.sampling.lanes import first_index, fold, pick, take_block, to_blocks
from cbjax.sampling.params import NUM_WORDS
from cbjax.sampling.settings import RowSettings, unpack
from cbjax.sampling.uniforms import uniforms


class Sampled(NamedTuple):
    """What was chosen, per row.

    Attributes:
      tokens: i32[rows]; 0 where the row is not finite.
      logprobs: f32[rows], the log probability of the token in the distribution it was drawn from, after
        temperature, top_k and top_p; for a greedy row the log softmax of its logits. 0 where it was not asked for
        or the row is not finite; never -inf.
      finite: bool[rows], False for a row with a NaN or +inf, or with nothing but -inf.
    """

    tokens: Array
    logprobs: Array
    finite: Array


def sample(logits: Array, words: Array, output_index: Array) -> Sampled:
    """One token per row: the most likely one, or one drawn after temperature, then top_k, then top_p.

    A draw inverts the cumulative distribution in vocabulary order at one 64-bit random number, whose high half
    chooses a block of tokens and whose low half the token inside. So near ties that change places, as they do
    between two kernels of the same model, do not change what is drawn.

    Args:
      logits: f32[rows, vocab]; -inf bans a token.
      words: u32[NUM_WORDS, rows], one `SamplingParams.pack()` per column; zeros are a greedy row.
      output_index: i32[rows], how many tokens the request has emitted before this one.

    Raises:
      ValueError: shapes that do not fit each other.
      TypeError: dtypes other than these.
    """
    _check(logits, words, output_index)
    blocks = to_blocks(logits)
    peaks = fold(jnp.maximum, blocks)
    peak = jnp.max(jnp.where(jnp.isnan(peaks), jnp.inf, peaks), axis=1)
    finite = jnp.isfinite(peak)
    greedy = _first_peak(blocks, peaks, peak)
    settings = unpack(words)
    sampled, wanted = settings.sampled & finite, settings.logprobs & finite
    rows = _rows(blocks, peak, sampled, settings, logits.shape[1])

    def draw() -> tuple[Array, Array]:
        high, low = uniforms(settings.seed_low, settings.seed_high, output_index)
        tokens, logprobs = _draw(rows, logits.shape[1], sampled, greedy, high, low)
        return tokens, jnp.where(wanted, logprobs, 0.0)

    any_work = jnp.any(sampled | wanted)
    tokens, logprobs = lax.cond(any_work, draw, lambda: (greedy, jnp.zeros_like(peak)))
    return Sampled(jnp.where(finite, tokens, 0), logprobs, finite)


def _check(logits: Array, words: Array, output_index: Array) -> None:
    types = (logits.dtype, words.dtype, output_index.dtype)
    if types != (jnp.float32, jnp.uint32, jnp.int32):
        raise TypeError(
            "logits, words and output_index must be float32, uint32 and int32; "
            f"got {', '.join(map(str, types))}. Convert them with astype."
        )
    rows = logits.shape[0] if logits.ndim == 2 else None
    if rows is None or words.shape != (NUM_WORDS, rows) or output_index.shape != (rows,):
        raise ValueError(
            f"shapes must be logits [rows, vocab], words [{NUM_WORDS}, rows] and output_index [rows]; "
            f"got {logits.shape}, {words.shape} and {output_index.shape}. Give every row its words and its index."
        )


def _first_peak(blocks: Array, peaks: Array, peak: Array) -> Array:
    """The lowest token id among the largest logits, i32[rows]; meaningless where the peak is not finite."""
    block = jnp.minimum(first_index(peaks == peak[:, None]), peaks.shape[1] - 1)
    return block * blocks.shape[2] + first_index(take_block(blocks, block) == peak[:, None])


def _rows(blocks: Array, peak: Array, sampled: Array, settings: RowSettings, vocab: int) -> Rows:
    ranked = sampled & (settings.top_k < vocab)
    return Rows(
        blocks=blocks,
        peak=peak,
        scale=inverse(settings.temperature),
        top_k=jnp.where(ranked, settings.top_k, 0).astype(jnp.float32),
        top_p=jnp.where(sampled, settings.top_p, 1.0),
    )


def _draw(rows: Rows, vocab: int, sampled: Array, greedy: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Tokens and logprobs of all rows; those not sampled keep their greedy token."""
    cut = lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1)),
        lambda: cutoff(rows, vocab),
        lambda: jnp.full_like(rows.peak, -jnp.inf),
    )
    kept = jnp.where(rows.blocks >= cut[:, None, None], rows.weights(rows.blocks), 0.0)
    block, mass = pick(fold(jnp.add, kept), high)
    chosen = take_block(rows.blocks, block)
    weights = jnp.where(chosen >= cut[:, None], rows.weights(chosen), 0.0)
    lane, inner_mass = pick(weights, low)
    # The blocks' sums and these weights may be rounded apart where both underflow.
    drawn = sampled & (inner_mass > 0)
    tokens = jnp.where(drawn, block * rows.blocks.shape[2] + lane, greedy)
    logit = jnp.where(drawn, jnp.take_along_axis(chosen, lane[:, None], axis=1)[:, 0], rows.peak)
    return tokens, rows.scaled(logit) - jnp.log(mass)
