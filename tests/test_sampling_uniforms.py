"""The random numbers behind a draw, and the draw's arithmetic at its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cbjax.sampling.lanes import pick
from cbjax.sampling.uniforms import threefry, uniforms


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_random123(key, counter, expected):
    words = threefry(*(jnp.full(1, word, jnp.uint32) for word in (*key, *counter)))
    assert tuple(int(word[0]) for word in words) == expected


def test_uniforms_are_the_bits_of_jax_fold_in():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 200, dtype=np.uint64)
    index = rng.integers(0, 2**31, 200).astype(np.int32)
    low, high = (seeds & 0xFFFFFFFF).astype(np.uint32), (seeds >> 32).astype(np.uint32)

    def folded(high: jax.Array, low: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, index))

    expected = (np.asarray(jax.vmap(folded)(high, low, index)) >> 8) / 2**24
    first, second = uniforms(jnp.asarray(low), jnp.asarray(high), jnp.asarray(index))
    np.testing.assert_array_equal(first, expected[:, 0])
    np.testing.assert_array_equal(second, expected[:, 1])
    assert max(first.max(), second.max()) < 1


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-24])
def test_pick_never_takes_a_weight_of_zero(uniform):
    rng = np.random.default_rng(1)
    weights = rng.random((2000, 40)).astype(np.float32) * 10.0 ** rng.integers(-20, 3, (2000, 40)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.6] = 0
    weights[:, :3] = 0
    weights[:, -3:] = 0
    weights[np.arange(2000), rng.integers(3, 37, 2000)] = 1e-30
    place, mass = jax.jit(pick)(weights, jnp.full(2000, uniform, jnp.float32))
    assert (weights[np.arange(2000), place] > 0).all()
    np.testing.assert_allclose(mass, weights.sum(1, dtype=np.float64), rtol=1e-6)
    if uniform == 0.0:
        np.testing.assert_array_equal(place, (weights > 0).argmax(1))


def test_pick_reaches_the_last_place_and_the_first():
    weights = jnp.asarray([[0.25, 0.25, 0.5]], jnp.float32)
    for uniform, place in [(0.0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 2), (1 - 2.0**-24, 2)]:
        assert pick(weights, jnp.full(1, uniform, jnp.float32))[0] == place
