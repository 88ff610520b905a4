"""The factors of stores of 8 bits, and rounding to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def head_factors(scale: float, k_scales: jax.Array | None, v_scales: jax.Array | None, kv_heads: int) -> jax.Array:
    """f32[2, kv_heads], what multiplies each head's scores, and its output."""
    factors = jnp.stack([jnp.full(kv_heads, scale, jnp.float32), jnp.ones(kv_heads, jnp.float32)])
    if k_scales is None or v_scales is None:
        return factors
    return factors * jnp.stack([k_scales, v_scales]).astype(jnp.float32)


def rounded(x: jax.Array, scales: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Keys or values [tokens, kv_heads, head_dim] as the store holds them."""
    dtype = jnp.dtype(dtype)
    if scales is not None:
        x = x.astype(jnp.float32) / scales.astype(jnp.float32)[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        x = jnp.round(x.astype(jnp.float32))
    if dtype.itemsize == 1:
        bound = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
        x = jnp.clip(x.astype(jnp.float32), -float(bound.max), float(bound.max))
    return x.astype(dtype)
