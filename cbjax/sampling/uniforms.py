"""Random numbers that depend on a request's seed and output index, and on nothing else.

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), the seed its key and the output index its counter: the bits of
`jax.random.key_data(jax.random.fold_in(key, output_index))` for a threefry key that holds the seed. It is written
out because it is part of what a seed promises: no jax flag or release changes a request's tokens, and twenty
rounds in a row compile in a third of the time of jax's loop.
"""

import jax.numpy as jnp
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def uniforms(seed_low: Array, seed_high: Array, output_index: Array) -> tuple[Array, Array]:
    """Two independent f32[rows] in [0, 1), 24 bits each, for seeds u32[rows] (halves) and indices i32[rows]."""
    counter = lax.bitcast_convert_type(output_index, jnp.uint32)
    first, second = threefry(seed_high, seed_low, jnp.zeros_like(counter), counter)
    return _unit(first), _unit(second)


def threefry(key_0: Array, key_1: Array, x_0: Array, x_1: Array) -> tuple[Array, Array]:
    """The block (x_0, x_1) enciphered with the key (key_0, key_1); u32 arrays of one shape."""
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(_PARITY))
    x_0, x_1 = x_0 + keys[0], x_1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x_0 = x_0 + x_1
            x_1 = x_0 ^ ((x_1 << rotation) | (x_1 >> (32 - rotation)))
        x_0 = x_0 + keys[(group + 1) % 3]
        x_1 = x_1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x_0, x_1


def _unit(word: Array) -> Array:
    return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
