"""The sampler words of a batch, read back into one array per setting."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from cbjax.sampling import params


class RowSettings(NamedTuple):
    """What each row asks for; all arrays are [rows].

    Attributes:
      sampled: bool, False for greedy rows.
      logprobs: bool, whether the chosen token's logprob is wanted.
      temperature: f32, 1.0 for greedy rows.
      top_k: i32, 0 when off.
      top_p: f32, 1.0 when off.
      seed_low, seed_high: u32, the two halves of the 64-bit seed.
    """

    sampled: Array
    logprobs: Array
    temperature: Array
    top_k: Array
    top_p: Array
    seed_low: Array
    seed_high: Array


def unpack(words: Array) -> RowSettings:
    """The inverse of `SamplingParams.pack`, for words u32[NUM_WORDS, rows].

    All-zero words (padding rows) read as a greedy row that wants no logprob.
    """
    flags = words[params.WORD_FLAGS]
    sampled = (flags & params.FLAG_SAMPLED) != 0
    temperature = lax.bitcast_convert_type(words[params.WORD_TEMPERATURE], jnp.float32)
    top_p = lax.bitcast_convert_type(words[params.WORD_TOP_P], jnp.float32)
    return RowSettings(
        sampled=sampled,
        logprobs=(flags & params.FLAG_LOGPROBS) != 0,
        temperature=jnp.where(sampled, temperature, 1.0),
        top_k=jnp.where(sampled, lax.bitcast_convert_type(words[params.WORD_TOP_K], jnp.int32), 0),
        top_p=jnp.where(sampled, top_p, 1.0),
        seed_low=words[params.WORD_SEED_LOW],
        seed_high=words[params.WORD_SEED_HIGH],
    )
