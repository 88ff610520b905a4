"""Paged attention in plain XLA: the portable implementation, and the one for CPU.

Keys and values are read in chunks of `CHUNK` tokens aligned to position 0 whatever the bucket, the block size or the
way the tokens came, and chunks are combined by an online softmax in float32. A chunk that is masked in full changes
no bit. So a token's result depends on its own context only: the same in a decode step and in a prefill, packed with
others or alone. Trip counts are run-time values: padding costs nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cbjax.attention.batch import GROUP, TILE, TILE_GROUP, PagedBatch, prepare_batch
from cbjax.attention.online_softmax import Softmax, add_chunk, finish, padded, start

CHUNK = 128


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    q_start: jax.Array,
    context_len: jax.Array,
    num_rows: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    single_token_rows: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into the store, then attends; the functional form of `PagedAttend`.

    Inside `jax.lax.scan` over layers carry one flat pool of `num_layers * num_blocks + 2` blocks and pass
    `table + layer * num_blocks`: as scanned inputs and outputs the layers' arrays would need a second pool.

    Args:
        q: [tokens, heads, head_dim], positions already applied.
        k: [tokens, kv_heads, head_dim], positions already applied; rounded to the store's dtype.
        v: [tokens, kv_heads, head_dim]; rounded to the store's dtype.
        kv: [2, kv_heads, num_blocks + 2, block_size, head_dim], one layer's store (see `KVSpec`); donate it.
        table: i32[slots + 1, max_blocks], block ids; row `slots` is the trash slot.
        slot: i32[rows], row of `table` for each batch row.
        q_start: i32[rows + 1]; row r's new tokens are `q_start[r]` to `q_start[r + 1]`.
        context_len: i32[rows], tokens of the row in the store after this step; its new tokens are the last of them.
        num_rows: i32 scalar, real rows; the rest are padding.
        scale: multiplies the scores; None is `head_dim ** -0.5`.
        window: a token sees itself and the `window - 1` tokens before it.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sinks: [heads], a logit per head in the softmax's denominator.
        single_token_rows: static promise that row r has the one token r; leaves the prefill part out.

    Returns:
        out [tokens, heads, head_dim] in q's dtype (zeros for padding), and the new `kv`.
    """
    batch = prepare_batch(
        table,
        slot,
        q_start,
        context_len,
        num_rows,
        num_tokens=q.shape[0],
        block_size=kv.shape[3],
        num_blocks=kv.shape[2] - 2,
        single_token_rows=single_token_rows,
    )
    return attend_batch(q, k, v, kv, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)


def attend_batch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` with the index tables made beforehand, once for all layers."""
    kv_heads, head_dim = k.shape[1:]
    kv = write_kv(kv, k, v, batch.write_index)
    layer = _Layer(
        units=_units(kv),
        batch=batch,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1),
    )
    grouped = q.reshape(q.shape[0], kv_heads, -1, head_dim)
    out = _decode(layer, grouped)
    if not batch.single_token_rows:
        out = _prefill(layer, grouped, out)
    return out.reshape(q.shape), kv


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, write_index: jax.Array) -> jax.Array:
    """Stores k, v [tokens, kv_heads, head_dim] at token indices i32[tokens] of the flat pool."""
    flat = kv.reshape(2, kv.shape[1], -1, kv.shape[4])
    new = jnp.stack([k, v]).astype(kv.dtype).swapaxes(1, 2)
    return flat.at[:, :, write_index].set(new, mode="promise_in_bounds").reshape(kv.shape)


class _Layer(NamedTuple):
    """What the two phases share. units: [2, kv_heads, units, unit, head_dim], the store in gatherable pieces."""

    units: jax.Array
    batch: PagedBatch
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # f32[1, kv_heads, group, 1]

    def first_seen(self, position: jax.Array) -> jax.Array:
        """The first position that a query at `position` sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)


def _units(kv: jax.Array) -> jax.Array:
    """Views the pool as units that divide both a block and a chunk; no copy."""
    unit = math.gcd(kv.shape[3], CHUNK)
    return kv.reshape(2, kv.shape[1], -1, unit, kv.shape[4])


def _gather(
    layer: _Layer, slot: jax.Array, low: jax.Array, high: jax.Array, chunk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [rows, kv_heads, CHUNK, head_dim] of one chunk; values are 0 outside positions low to high.

    Weights of exactly 0 do not make an unwritten cell harmless: it may hold a NaN. Rows come first, since a CPU deals
    the leading axis to its cores, and there are more rows than heads.
    """
    batch, (_, kv_heads, num_units, unit, head_dim) = layer.batch, layer.units.shape
    position = chunk * CHUNK + jnp.arange(0, CHUNK, unit, dtype=jnp.int32)
    column = jnp.minimum(position // batch.block_size, batch.table.shape[1] - 1)
    block = batch.table[slot[:, None], column[None, :]]
    # A unit without a token to read is never followed: its table entry may be anything.
    block = jnp.where(position[None, :] < high[:, None], block, batch.num_blocks)
    index = block * (batch.block_size // unit) + (position % batch.block_size // unit)[None, :]
    # With head and unit as one leading axis the pieces land in their final order, in one pass.
    pool = layer.units.reshape(-1, unit, head_dim)
    key_index = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None] * num_units + index[:, None, :]
    value_index = key_index + kv_heads * num_units
    keys, values = (pool.at[i].get(mode="promise_in_bounds") for i in (key_index, value_index))
    position = (position[:, None] + jnp.arange(unit, dtype=jnp.int32)[None, :])[None]
    readable = (position >= low[:, None, None]) & (position < high[:, None, None])
    values = jnp.where(readable[:, None, ..., None], values, jnp.zeros((), values.dtype))
    values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, 0), (0, padded(head_dim) - head_dim)))
    shape = (slot.shape[0], kv_heads, CHUNK)
    return keys.reshape(*shape, head_dim), values.reshape(*shape, -1)


def _attend(
    layer: _Layer, q: jax.Array, slot: jax.Array, query: jax.Array, high: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Attention of several rows at once, all their chunks until the longest row's last.

    Args:
        layer: what all rows share.
        q: [rows, kv_heads, queries, head_dim].
        slot: i32[rows], row of the block table.
        query: i32[rows, queries or 1], each query's position; the first is a row's lowest.
        high: i32[rows], tokens that may be read; 0 for padding.
        sinks: f32, broadcastable to [rows, kv_heads, queries, 1].

    Returns:
        f32, like q.
    """
    low = layer.first_seen(query[:, 0])
    first = jnp.min(jnp.where(high > 0, low, jnp.max(low))) // CHUNK

    def chunk(index: jax.Array, state: Softmax) -> Softmax:
        position = index * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None, None, :]
        visible = (position <= query[..., None]) & (position < high[:, None, None])
        if layer.window is not None:
            visible &= query[..., None] - position < layer.window
        k, v = _gather(layer, slot, low, high, index)
        return add_chunk(state, q, k, v, visible[:, None], scale=layer.scale, soft_cap=layer.soft_cap)

    trips = (jnp.max(high) + CHUNK - 1) // CHUNK
    return finish(jax.lax.fori_loop(first, trips, chunk, start(q.shape, sinks)), q.shape[3])


def _decode(layer: _Layer, q: jax.Array) -> jax.Array:
    """All rows with one new token, `GROUP` rows at a time: q [tokens, kv_heads, group, head_dim], same shape out."""
    batch = layer.batch
    rows, size = batch.decode_slot.shape[0], min(GROUP, batch.decode_slot.shape[0])
    padding = -rows % size
    token, slot, context = (
        jnp.pad(x, (0, padding)) for x in (batch.decode_token, batch.decode_slot, batch.decode_context)
    )
    num_groups = (jnp.sum(context > 0, dtype=jnp.int32) + size - 1) // size

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        group_token, group_slot, group_context = (
            jax.lax.dynamic_slice(x, (index * size,), (size,)) for x in (token, slot, context)
        )
        mixed = _decode_group(layer, q[group_token], group_slot, group_context)
        return jax.lax.dynamic_update_slice(out, mixed, (index * size, 0, 0, 0))

    out = jnp.zeros((rows + padding, *q.shape[1:]), q.dtype)
    if rows == size:
        out = group(jnp.int32(0), out)
    else:
        out = jax.lax.fori_loop(0, num_groups, group, out)
    is_decode = (batch.token_decode >= 0)[:, None, None, None]
    return jnp.where(is_decode, out[jnp.maximum(batch.token_decode, 0)], jnp.zeros((), q.dtype))


def _decode_group(layer: _Layer, q: jax.Array, slot: jax.Array, context: jax.Array) -> jax.Array:
    """q [rows, kv_heads, group, head_dim] at the last position of each row's context i32[rows]; same shape out."""
    group = q.shape[2]
    # A single query would be a product of a matrix and a vector, which rounds differently from a prefill's.
    q = q if group > 1 else jnp.tile(q, (1, 1, 2, 1))
    return _attend(layer, q, slot, context[:, None] - 1, context, layer.sinks)[:, :, :group].astype(q.dtype)


def _prefill(layer: _Layer, q: jax.Array, out: jax.Array) -> jax.Array:
    """Rows with several new tokens, `TILE_GROUP` tiles of `TILE` queries at a time, written into `out` like q."""
    batch = layer.batch
    tokens = q.shape[0]
    # A slice that would end beyond the array is shifted silently; with the padding none does.
    q, out = (jnp.pad(x, ((0, TILE), (0, 0), (0, 0), (0, 0))) for x in (q, out))

    def tiles(index: jax.Array, out: jax.Array) -> jax.Array:
        starts, count, slot, first = (
            jax.lax.dynamic_slice(x, (index * TILE_GROUP,), (TILE_GROUP,))
            for x in (batch.tile_start, batch.tile_count, batch.tile_slot, batch.tile_position)
        )
        at = [(starts[i], 0, 0, 0) for i in range(TILE_GROUP)]
        queries = jnp.stack([jax.lax.dynamic_slice(q, where, (TILE, *q.shape[1:])) for where in at])
        mixed = _prefill_tiles(layer, queries, slot, first, count)
        for i, where in enumerate(at):
            before = jax.lax.dynamic_slice(out, where, mixed.shape[1:])
            real = jnp.arange(TILE, dtype=jnp.int32) < count[i]
            out = jax.lax.dynamic_update_slice(out, jnp.where(real[:, None, None, None], mixed[i], before), where)
        return out

    return jax.lax.fori_loop(0, (batch.num_tiles + TILE_GROUP - 1) // TILE_GROUP, tiles, out)[:tokens]


def _prefill_tiles(layer: _Layer, q: jax.Array, slot: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    """q [tiles, TILE, kv_heads, group, head_dim], the first `count` of each tile real, at positions from `first`."""
    tiles, size, kv_heads, group, head_dim = q.shape
    grouped = q.swapaxes(1, 2).reshape(tiles, kv_heads, size * group, head_dim)
    query = jnp.repeat(first[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :], group, axis=1)
    sinks = None if layer.sinks is None else jnp.tile(layer.sinks, (1, 1, size, 1))
    mixed = _attend(layer, grouped, slot, query, jnp.where(count > 0, first + count, 0), sinks)
    return mixed.reshape(tiles, kv_heads, size, group, head_dim).swapaxes(1, 2).astype(q.dtype)
