"""Devices for tests of what moves whole blocks: no model, a store of random numbers, NaN in its reserved blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from cbjax.attention import LayerGroups
from cbjax.cache import HostTier, PagedAttentionCache, blocks_per_call
from cbjax.programs import ModelDevice
from cbjax.scheduler import Offload, Restore, SchedulerConfig, scheduler_named

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


@functools.partial(jax.jit, donate_argnums=0)
def _lost(kv):
    return [array * 0 - 1 for array in kv]


def overwrite(device):
    """A step that takes the store and leaves nothing of what was in its blocks."""
    device.cache.kv = _lost(device.cache.kv)


@functools.partial(jax.jit, donate_argnums=0)
def _late(kv):
    one = jax.lax.fori_loop(0, 200, lambda _, m: m @ m, jnp.eye(200))[0, 0]
    return [array * one.astype(array.dtype) for array in kv]


def arrive_late(device):
    """A step that changes nothing and takes so long that what is dispatched next has to wait for it."""
    device.cache.kv = _late(device.cache.kv)


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
