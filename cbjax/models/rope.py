"""Rotary position embedding, "rotate half" convention: element i is paired with element i + head_dim / 2."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cbjax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class RopeTables(NamedTuple):
    """Cosines and sines of one step's tokens, [tokens, 1, head_dim / 2], in the model's dtype."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per token of each rotated pair, f32[head_dim / 2]."""
    # The power is rounded once, from float64: these are PyTorch's float32 values, almost always to the bit.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(config.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _scale_llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(powers, config.theta, scaling)


def rope_tables(config: RopeConfig, head_dim: int, positions: jax.Array, dtype: jax.typing.DTypeLike) -> RopeTables:
    """Tables for positions i32[tokens]; angles, cosines and sines are computed in float32, then rounded."""
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(config.scaling, YarnScaling):
        cos, sin = cos * config.scaling.attention_factor, sin * config.scaling.attention_factor
    return RopeTables(cos.astype(dtype), sin.astype(dtype))


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotates x [tokens, heads, head_dim] by each token's angles."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin], axis=-1
    )


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = np.float32(2 * math.pi) / frequencies
    factor = np.float32(scaling.factor)
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    blend = np.float32(scaling.original_max_positions) / wavelengths - np.float32(scaling.low_freq_factor)
    blend = blend / np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (np.float32(1.0) - blend) * frequencies / factor + blend * frequencies
    scaled = np.where(wavelengths > longest, frequencies / factor, blended)
    return np.where(wavelengths < shortest, frequencies, scaled).astype(np.float32)


def _scale_yarn(powers: np.ndarray, theta: float, scaling: YarnScaling) -> np.ndarray:
    """Frequencies between 1 / powers and 1 / (factor * powers), in transformers' order of operations."""
    pairs = len(powers)

    def pair_with(turns: float) -> float:
        """The number of the pair, not rounded, that turns so often in the original context."""
        return pairs * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # The least width keeps the division finite.
    width = np.float32(high - low if high != low else 0.001)
    stretched = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(low)) / width, np.float32(0), np.float32(1))
    kept = np.float32(1.0) - stretched
    slow = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    return slow * (np.float32(1.0) - kept) + np.float32(1.0) / powers * kept
