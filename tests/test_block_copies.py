"""Copies of whole blocks within the store, and the programs that move blocks: in place, whatever the pool's size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_devices import (
    NUM_BLOCKS,
    SHAPES,
    SIZE,
    assert_holds,
    bare_device,
    blocks,
    compiled,
    make_device,
    offload,
    restore,
)

from cbjax.cache import HostTier, blocks_per_call
from cbjax.programs import StrictModeError

# Copies within the store.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("count", [0, 1, SIZE, NUM_BLOCKS // 2])
def test_blocks_are_copied_within_the_store(shapes, dtype, count):
    device, content = make_device(shapes, dtype)
    ids = np.random.default_rng(2).permutation(NUM_BLOCKS).astype(np.int32)
    sources, destinations = ids[:count] // 2, ids[NUM_BLOCKS - count :]
    device.copy_blocks(sources, destinations)
    for array in content:
        array[:, :, destinations] = array[:, :, sources]
    assert_holds(device, content)


@pytest.mark.parametrize("count", [2, SIZE, SIZE + 1, NUM_BLOCKS - 1])
@pytest.mark.parametrize("step", [1, -1])
def test_every_source_is_read_before_it_is_overwritten(count, step):
    device, content = make_device()
    sources = np.arange(count, dtype=np.int32)[::step]
    device.copy_blocks(sources, sources + 1)
    for array in content:
        array[:, :, sources + 1] = array[:, :, sources].copy()
    assert_holds(device, content)


def test_blocks_can_change_places():
    device, content = make_device()
    device.copy_blocks(blocks(4, 8, 8), blocks(8, 4, 5))
    for array in content:
        array[:, :, [8, 4, 5]] = array[:, :, [4, 8, 8]]
    assert_holds(device, content)


def test_more_places_changed_all_around_than_a_call_takes_is_a_bug():
    device, _ = make_device()
    ids = np.arange(SIZE + 1, dtype=np.int32)
    with pytest.raises(AssertionError, match="change places"):
        device.copy_blocks(ids, np.roll(ids, 1))


# The programs.


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporaries_do_not_grow_with_the_pool_and_the_store_is_updated_in_place(shapes, dtype):
    device, _ = make_device(shapes, dtype)
    moved = SIZE * sum(spec.block_bytes for spec in device.cache.specs)
    small, large = (compiled(SHAPES[shapes], jnp.dtype(dtype), n) for n in (NUM_BLOCKS, 4096))
    pool = sum(spec.block_bytes for spec in device.cache.specs) * 4098
    for key in ("gather", "scatter", "copy"):
        assert small[key].temp_bytes == large[key].temp_bytes
        assert 0 < large[key].temp_bytes < 3 * moved < pool / 50
        aliased = large[key].call.memory_analysis().alias_size_in_bytes
        assert aliased >= pool if key != "gather" else aliased == 0


def test_invariant_7_with_a_tier_its_programs_belong_to_the_warm_up_and_without_they_do_not():
    assert bare_device(SHAPES["alike"], jnp.float32, 8).missing([]) == ["table"]
    device = bare_device(SHAPES["alike"], jnp.float32, 8, tier=HostTier(None))
    assert device.missing([]) == ["table", "gather", "scatter"]
    device.strict = True
    with pytest.raises(StrictModeError, match="blocks to the host"):
        device.offload(offload(1, [0]))
    assert 1 not in device.host_tier


def test_invariant_7_moving_blocks_compiles_nothing(caplog):
    device, _ = make_device()
    jax.block_until_ready(device.cache.kv)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for count in range(1, SIZE + 2):
            device.offload(offload(count, range(count)))
            device.restore(restore(count, range(0, count, 2), range(0, count, 2)))
            device.copy_blocks(np.arange(count, dtype=np.int32), np.arange(20, 20 + count, dtype=np.int32))
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 2)(1)
        assert "ompil" in caplog.text, "jax no longer logs what it compiles"


@pytest.mark.parametrize(("block_size", "expected"), [(4, 16), (16, 16), (32, 8), (256, 1), (4096, 1)])
def test_a_call_moves_as_many_tokens_whatever_the_block_size(block_size, expected):
    assert blocks_per_call(block_size) == expected
