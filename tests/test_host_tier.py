"""The host tier on the device's side: blocks that leave the store and come back, bit for bit, with nobody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_devices import (
    KINDS,
    NUM_BLOCKS,
    SHAPES,
    SIZE,
    arrive_late,
    assert_holds,
    bare_device,
    blocks,
    copies_alive,
    make_device,
    offload,
    overwrite,
    restore,
)

from cbjax.testing import HistoryHashDevice

# There and back.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_blocks_come_back_bit_for_bit_in_any_order_and_only_those_asked_for(shapes, dtype, kind):
    device, content = make_device(shapes, dtype, kind=kind)
    rng = np.random.default_rng(1)
    left = rng.permutation(NUM_BLOCKS)[: 2 * SIZE + 3]
    device.offload(offload(7, left))
    assert device.host_tier.num_blocks == len(left)
    index, to = rng.permutation(len(left))[: SIZE + 5], rng.permutation(NUM_BLOCKS)[: SIZE + 5]
    device.restore(restore(7, index, to))
    expected = [array.copy() for array in content]
    for array, before in zip(expected, content, strict=True):
        array[:, :, to] = before[:, :, left[index]]
    assert_holds(device, expected)
    assert 7 not in device.host_tier


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_copies_lie_in_host_memory_until_they_are_dropped(kind):
    device, _ = make_device(kind=kind)
    assert copies_alive(kind) == 0
    device.offload(offload(1, range(SIZE + 2)))
    device.offload(offload(2, [0]))
    assert copies_alive(kind) == SIZE + 3
    device.restore(restore(1, [3], [0]))
    home = jax.devices()[0].default_memory().kind
    assert {array.sharding.memory_kind for array in device.cache.kv} == {home}
    assert copies_alive(kind) == 1
    device.offload(offload(1, [1]))
    device.close()
    assert copies_alive(kind) == 0


@pytest.mark.parametrize("count", [1, SIZE - 1, SIZE, SIZE + 1])
def test_host_memory_holds_the_blocks_and_no_padding(count):
    device, content = make_device("mixed", "bfloat16")
    device.offload(offload(1, range(count)))
    assert device.host_tier.num_bytes == count * sum(spec.block_bytes for spec in device.cache.specs)
    device.restore(restore(1, range(count), range(count)))
    assert device.host_tier.num_bytes == 0
    assert_holds(device, content)


def test_a_pool_smaller_than_a_call_is_moved_whole():
    device, content = make_device(num_blocks=2)
    device.offload(offload(1, [1, 0]))
    overwrite(device)
    device.restore(restore(1, [0, 1], [1, 0]))
    for array, wanted in zip(device.cache.kv, content, strict=True):
        assert np.array_equal(np.asarray(array)[:, :, :2], wanted[:, :, :2])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_several_requests_are_kept_apart(kind):
    device, content = make_device(kind=kind)
    device.offload(offload(1, [3, 4]))
    device.offload(offload(2, [5]))
    overwrite(device)
    device.offload(offload(3, [6]))
    device.restore(restore(2, [0], [4]))
    device.restore(restore(1, [1], [5]))
    kv = np.asarray(device.cache.kv[0])
    assert np.array_equal(kv[:, :, 4], content[0][:, :, 5])
    assert np.array_equal(kv[:, :, 5], content[0][:, :, 4])
    assert (kv[:, :, [0, 1, 2, 3, 6]] == -1).all()
    assert device.host_tier.num_blocks == 1


def test_nothing_restored_drops_the_copy_too():
    device, content = make_device()
    device.offload(offload(1, [3]))
    device.restore(restore(1, [], []))
    assert 1 not in device.host_tier
    assert_holds(device, content)


# Order on the device.


@pytest.mark.parametrize("kind", KINDS)
def test_rule_1_a_block_is_read_before_the_step_that_takes_the_store(kind):
    device, content = make_device(kind=kind)
    jax.block_until_ready(device.cache.kv)
    for round in range(10):
        device.cache.kv = [jnp.array(array) for array in content]
        arrive_late(device)
        device.offload(offload(round, range(SIZE + 1)))
        old = device.cache.kv
        overwrite(device)
        overwrite(device)
        assert all(array.is_deleted() for array in old)
        device.restore(restore(round, range(SIZE + 1), range(20, 21 + SIZE)))
        for array, wanted in zip(device.cache.kv, content, strict=True):
            assert np.array_equal(np.asarray(array)[:, :, 20 : 21 + SIZE], wanted[:, :, : SIZE + 1])
            assert (np.asarray(array)[:, :, :20] == -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_blocks_as_they_were_whatever_the_store_becomes(kind):
    device, content = make_device(kind=kind)
    device.offload(offload(1, [2, 9]))
    device.cache.reset()
    device.restore(restore(1, [1], [0]))
    kv = np.asarray(device.cache.kv[1])
    assert np.array_equal(kv[:, :, 0], content[1][:, :, 9])
    assert not kv[:, :, 1:NUM_BLOCKS].any()


def test_invariant_3_nan_in_the_reserved_blocks_stays_there():
    for count in (1, SIZE + 1):
        device, content = make_device()
        device.offload(offload(1, range(count)))
        device.restore(restore(1, range(count), range(count)))
        device.copy_blocks(blocks(0), blocks(0))
        assert_holds(device, content)
        assert all(np.isfinite(np.asarray(array)[:, :, :NUM_BLOCKS]).all() for array in device.cache.kv)
        assert all(np.isnan(np.asarray(array)[:, :, NUM_BLOCKS]).all() for array in device.cache.kv)


# Dropping copies.


@pytest.mark.parametrize("kind", KINDS)
def test_discarded_copies_are_gone_and_a_missing_one_is_no_error(kind):
    device, _ = make_device(kind=kind)
    device.offload(offload(1, [0]))
    device.offload(offload(2, [1, 2]))
    device.discard(1)
    device.discard(1)
    assert (1 in device.host_tier, device.host_tier.num_blocks) == (False, 2)
    device.offload(offload(1, [4]))
    device.recover()
    assert device.host_tier.num_blocks == 0
    assert not device.cache.is_lost
    device.offload(offload(1, [4]))
    device.close()
    assert device.host_tier.num_bytes == 0


def test_without_a_tier_there_is_nothing_to_discard():
    device = bare_device(SHAPES["alike"], jnp.float32, 8)
    device.discard(3)
    device.recover()
    device.close()
    with pytest.raises(AssertionError, match="off"):
        device.offload(offload(1, [0]))


def test_an_interrupted_copy_leaves_none():
    device, _ = make_device()

    def interrupted():
        yield device.programs["gather"].call(device.cache.kv, np.zeros(SIZE, np.int32))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.host_tier.keep(1, interrupted())
    assert 1 not in device.host_tier
    assert device.host_tier.num_blocks == 0


def history_hash_device():
    return HistoryHashDevice(num_blocks=8, block_size=4, num_slots=2, max_blocks=8)


@pytest.mark.parametrize("make", [lambda: make_device()[0], history_hash_device], ids=["model", "history hash"])
def test_a_second_copy_and_a_missing_one_are_bugs(make):
    device = make()
    device.offload(offload(1, [0, 1]))
    with pytest.raises(AssertionError, match=r"uid 1 .*already"):
        device.offload(offload(1, [2]))
    with pytest.raises(AssertionError, match=r"uid 2 .*no copy"):
        device.restore(restore(2, [0], [2]))
    device.restore(restore(1, [1], [2]))
    with pytest.raises(AssertionError, match=r"uid 1 .*no copy"):
        device.restore(restore(1, [0], [3]))


def test_the_history_hash_device_moves_cells_and_their_history():
    device = history_hash_device()
    device.cells[:] = np.arange(80).reshape(2, 40)
    device.history[:] = np.arange(40)
    cells, history = device.cells.copy(), device.history.copy()
    device.offload(offload(5, [6, 1, 3]))
    device.offload(offload(6, [2]))
    device.cells[:], device.history[:] = -1, 0
    device.restore(restore(5, [2, 0], [0, 7]))
    for to, source in ((0, 3), (7, 6)):
        new, old = slice(4 * to, 4 * to + 4), slice(4 * source, 4 * source + 4)
        assert np.array_equal(device.cells[:, new], cells[:, old])
        assert np.array_equal(device.history[new], history[old])
    assert (device.cells[:, 4:28] == -1).all()
    assert device.copies.keys() == {6}
    device.discard(5)
    device.recover()
    assert not device.copies


@pytest.mark.parametrize("wrong", [offload(1, [8]), offload(1, [-1]), offload(1, [3, 3])])
def test_the_history_hash_device_notices_blocks_that_nobody_can_hold(wrong):
    with pytest.raises(AssertionError, match="uid 1"):
        history_hash_device().offload(wrong)


@pytest.mark.parametrize("wrong", [restore(1, [2], [0]), restore(1, [0], [9]), restore(1, [0, 1], [3, 3])])
def test_the_history_hash_device_notices_a_wrong_restore(wrong):
    device = history_hash_device()
    device.offload(offload(1, [0, 1]))
    with pytest.raises(AssertionError, match="uid 1"):
        device.restore(wrong)


def test_a_restore_that_names_more_blocks_than_places_is_a_bug():
    device, _ = make_device()
    device.offload(offload(1, [0, 1]))
    for index, to in (([0], [3, 4]), ([0, 1], [3])):
        with pytest.raises(AssertionError, match="uid 1 restores other blocks"):
            device.restore(restore(1, index, to))
