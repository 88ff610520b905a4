"""The host tier on the device's side: blocks that leave the store and come back, bit for bit, with nobody else's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cbjax.attention import LayerGroups
from cbjax.cache import HostTier, PagedAttentionCache, blocks_per_call
from cbjax.programs import ModelDevice, StrictModeError
from cbjax.scheduler import Offload, Restore, SchedulerConfig, scheduler_named
from cbjax.testing import HistoryHashDevice

NUM_BLOCKS, BLOCK_SIZE = 40, 4
SIZE = blocks_per_call(BLOCK_SIZE)
# (kv_heads, head_dim) of each array: like ones, and ones of several shapes between each other.
SHAPES = {"alike": ((2, 8),) * 3, "mixed": ((2, 8), (1, 4), (2, 8), (3, 5))}
KINDS = ["pinned_host", "unpinned_host", None]


@functools.cache
def compiled(shapes, dtype, num_blocks):
    """The programs that move blocks, compiled once for all tests."""
    device = bare_device(shapes, dtype, num_blocks)
    list(device.compile_all(["gather", "scatter", "copy"]))
    return device.programs


def bare_device(shapes, dtype, num_blocks, *, tier=None):
    """A device whose model is never asked."""
    groups = LayerGroups(windows=(None,), shapes=shapes, places=tuple((0, j) for j in range(len(shapes))))
    cache = PagedAttentionCache(groups, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
    config = SchedulerConfig(
        policy=scheduler_named("fifo"),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_batch_tokens=8,
        max_requests_per_batch=2,
        max_blocks_per_request=4,
        safety_margin=0.0,
    )

    def no_model(params):
        raise AssertionError("no step runs here")

    return ModelDevice(no_model, {}, cache, config, host_tier=tier)


def make_device(shapes="alike", dtype="float32", num_blocks=NUM_BLOCKS, kind="pinned_host"):
    """A device with a host tier and a store of random numbers, its reserved blocks NaN; also what is in it."""
    device = bare_device(SHAPES[shapes], jnp.dtype(dtype), num_blocks, tier=HostTier(kind))
    device.programs = dict(compiled(SHAPES[shapes], jnp.dtype(dtype), num_blocks))
    device.strict = True
    rng = np.random.default_rng(0)
    content = [rng.standard_normal(spec.shape).astype(spec.dtype) for spec in device.cache.specs]
    for array in content:
        array[:, :, num_blocks:] = np.nan
    device.cache.kv = [jnp.array(array) for array in content]
    return device, content


def blocks(*ids):
    return np.array(ids, np.int32)


def offload(uid, ids):
    return Offload(uid=uid, slot=0, blocks=np.asarray(ids, np.int32))


def restore(uid, index, ids):
    return Restore(uid=uid, index=np.asarray(index, np.int32), blocks=np.asarray(ids, np.int32))


def overwrite(device):
    """A step that takes the store and leaves nothing of what was in its blocks."""
    lost = jax.jit(lambda kv: [array * 0 - 1 for array in kv], donate_argnums=0)
    device.cache.kv = lost(device.cache.kv)


def copies_alive(kind):
    """Arrays that lie in this kind of memory, of anybody in this process."""
    return sum(array.sharding.memory_kind == kind for array in jax.live_arrays())


def assert_holds(device, expected):
    """Bits of every block, but for the write trash, which may hold anything."""
    for array, wanted in zip(device.cache.kv, expected, strict=True):
        got = np.asarray(array)
        assert got.dtype == wanted.dtype
        view = np.dtype(f"u{got.dtype.itemsize}")
        assert np.array_equal(got[:, :, :-1].view(view), wanted[:, :, :-1].view(view))


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
    with pytest.raises(StrictModeError, match="gather"):
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
