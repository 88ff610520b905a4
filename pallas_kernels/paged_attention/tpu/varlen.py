"""Varlen: rows with several new tokens, whose keys and values are in the store already.

Query tokens are taken in tiles of the flat batch. An item is the part of a row that lies in a tile. A tile's items are
computed one after the other, each over the chunks that its tokens see, and leave each other's tokens as they are.
Chunks and arithmetic are those of `decode`. While one chunk is computed with, the next one is on its way, also over the
end of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.chunks import ChunkBuffers, Chunking, Span
from pallas_kernels.paged_attention.tpu.layout import LANES
from pallas_kernels.paged_attention.tpu.softmax import MASKED, attend_chunk, finish, initial_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """The static side of a varlen kernel.

    Attributes:
      chunking: of the keys and values.
      group: query heads of a kv head.
      tile: query tokens taken together.
      soft_cap: as in `paged_attention`.
      cores: of the device, among which the tiles are divided where their number allows it.
    """

    chunking: Chunking
    group: int
    tile: int
    soft_cap: float | None = None
    cores: int = 1


def varlen(
    spec: Varlen,
    tile_items: jax.Array,
    item_slot: jax.Array,
    item_first: jax.Array,
    item_stop: jax.Array,
    item_offset: jax.Array,
    q: jax.Array,
    factors: jax.Array,
    sinks: jax.Array,
    table: jax.Array,
    kv: jax.Array,
    *,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Attends from the tokens of all items.

    Args:
      spec: sizes.
      tile_items: i32[tiles + 1], the first item of each tile.
      item_slot: i32[items], row of `table`.
      item_first, item_stop: i32[items], the item's tokens in the flat batch; at least one, all in one tile.
      item_offset: i32[items], what a token's index lacks to its position.
      q: [tokens, kv_heads * group * lanes]; tokens is a multiple of the tile.
      factors: f32[2, kv_heads], what multiplies each head's scores, and its output.
      sinks: f32[kv_heads, group, 128], a logit in every lane; `MASKED` where there is none.
      table: i32[slots + 1, max_blocks].
      kv: the store, with the items' own keys and values; not written.

    Returns:
      Like q, in its dtype; zeros for tokens of no item.
    """
    layout, tile = spec.chunking.layout, spec.tile
    tokens, width = q.shape
    assert tokens % tile == 0, f"tokens are padded to a multiple of {tile}; got {tokens}"
    rows = spec.group * tile
    cores = spec.cores if tokens // tile % spec.cores == 0 else 1
    tiles = tokens // tile // cores
    by_tile = pl.BlockSpec((tile, width), lambda core, index, *_: (core * tiles + index, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(cores, tiles),
        in_specs=[
            by_tile,
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.VMEM),
            anywhere,
            anywhere,
        ],
        out_specs=by_tile,
        scratch_shapes=[
            pltpu.SMEM((1,), jnp.int32),
            pltpu.VMEM((layout.num_kv_heads, rows, LANES), jnp.float32),
            pltpu.VMEM((layout.num_kv_heads, rows, LANES), jnp.float32),
            pltpu.VMEM((layout.num_kv_heads, rows, layout.lanes), jnp.float32),
            *spec.chunking.scratch(table.shape[1]),
        ],
    )
    return pl.pallas_call(
        partial(_kernel, spec),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        cost_estimate=spec.chunking.cost(tokens, tokens // tile, spec.group, table.shape[1]),
        interpret=interpret,
        name="paged_attention_varlen",
    )(tile_items, item_slot, item_first, item_stop, item_offset, q, factors, sinks, table, kv)


def _kernel(spec: Varlen, tile_items, slot, first, stop, offset, q, factors, sinks, table, kv, out, done, *scratch):
    """One tile of tokens; `done`, chunks so far, goes from one to the next."""
    state, buffers = scratch[:3], ChunkBuffers(spec.chunking, table, kv, *scratch[3:])
    tiles = pl.num_programs(1)
    tile = pl.program_id(0) * tiles + pl.program_id(1)
    end = tile_items[(pl.program_id(0) + 1) * tiles]
    items = _Items(spec, tile, end, slot, first, stop, offset, q, factors, done, state, buffers)

    @pl.when(pl.program_id(1) == 0)
    def _():
        items.begin(tile_items[tile])

    @pl.when(tile_items[tile] == tile_items[tile + 1])
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(tile_items[tile] < tile_items[tile + 1])
    def _():
        _reset(spec, sinks, state)

        def run(item, carry):
            items.run(item)
            return carry

        lax.fori_loop(tile_items[tile], tile_items[tile + 1], run, 0)
        _finish(spec, factors, state, out)


def _each_head(spec: Varlen, body) -> None:
    """Runs `body(head)` in a loop: a head's work is long enough, and the program is as short as for one."""

    def run(head, carry):
        body(head)
        return carry

    lax.fori_loop(0, spec.chunking.layout.num_kv_heads, run, 0)


def _lanes(spec: Varlen, head, query: int):
    """Where a query head lies among the others, which are side by side."""
    lanes = spec.chunking.layout.lanes
    return pl.ds(pl.multiple_of((head * spec.group + query) * lanes, lanes), lanes)


def _reset(spec: Varlen, sinks, state) -> None:
    maximum, weights, values = state

    def reset(head):
        for query in range(spec.group):
            rows = pl.ds(query * spec.tile, spec.tile)
            sink = jnp.broadcast_to(sinks[head, query : query + 1], (spec.tile, LANES))
            maximum[head, rows] = sink
            weights[head, rows] = jnp.where(sink > MASKED, initial_weights(sink.shape), 0.0)
        values[head] = jnp.zeros(values.shape[1:], jnp.float32)

    _each_head(spec, reset)


def _finish(spec: Varlen, factors, state, out) -> None:
    """A token of no item has the sink's weight at most, and 0 as its value."""
    _, weights, values = state

    def write(head):
        for query in range(spec.group):
            rows = pl.ds(query * spec.tile, spec.tile)
            mean = finish(weights[head, rows], values[head, rows]) * factors[1, head]
            out[:, _lanes(spec, head, query)] = mean.astype(out.dtype)

    _each_head(spec, write)


@dataclass(frozen=True, slots=True)
class _Items:
    """A core's items, which stop at `end`, and the kernel's refs.

    done: i32[1], chunks so far, whose parity says which buffer is whose.
    """

    spec: Varlen
    tile: Any
    end: Any
    slot: Any
    first: Any
    stop: Any
    offset: Any
    q: Any
    factors: Any
    done: Any
    state: Any
    buffers: ChunkBuffers

    def span(self, item) -> Span:
        """What an item's tokens see between them."""
        window, offset = self.spec.chunking.window, self.offset[item]
        low = 0 if window is None else jnp.maximum(self.first[item] + offset - window + 1, 0)
        return Span(low, self.stop[item] + offset)

    def begin(self, item) -> None:
        """Before the first item: its first chunk is fetched."""
        self.done[0] = 0

        @pl.when(item < self.end)
        def _():
            self.buffers.ids_copy(self.slot[item], item % 2).start()
            self._start(item, 0)

    def _start(self, item, parity) -> None:
        """Begins to fetch an item's first chunk, once its block ids are there."""
        self.buffers.ids_copy(self.slot[item], item % 2).wait()
        span = self.span(item)
        self.buffers.start(span, span.first_chunk(self.spec.chunking), item % 2, parity)

    def run(self, item) -> None:
        """One item."""
        chunking, buffers, span = self.spec.chunking, self.buffers, self.span(item)
        done, following = self.done[0], item + 1

        @pl.when(following < self.end)
        def _():
            buffers.ids_copy(self.slot[following], following % 2).start()

        first, last = span.first_chunk(chunking), span.last_chunk(chunking)

        def chunk_in(masked, chunk, carry):
            parity = (done + chunk - first) % 2
            buffers.start(span, chunk + 1, item % 2, 1 - parity)
            buffers.wait(span, chunk, parity)
            if chunking.window is not None:
                buffers.clear(span, chunk, parity, chunking.tokens)
            self._compute(item, chunk, parity, chunking.tokens, masked=masked)
            return carry

        # A tile that is one row's, and chunks that all of its tokens see, need no mask.
        whole = (self.stop[item] - self.first[item] == self.spec.tile) & (chunking.window is None)
        plain = jnp.where(
            whole, jnp.minimum((self.first[item] + self.offset[item] + 1) // chunking.tokens, last), first
        )
        plain = jnp.maximum(plain, first)
        if chunking.window is None:
            lax.fori_loop(first, plain, partial(chunk_in, False), 0)
        lax.fori_loop(plain, last, partial(chunk_in, True), 0)
        parity = (done + last - first) % 2

        @pl.when(following < self.end)
        def _():
            self._start(following, 1 - parity)

        buffers.wait(span, last, parity)

        def tail(tokens):
            buffers.clear(span, last, parity, tokens)
            self._compute(item, last, parity, tokens, masked=True)

        buffers.for_tail(span.high - last * chunking.tokens, tail)
        self.done[0] = done + last - first + 1

    def _compute(self, item, chunk, parity, tokens: int, *, masked: bool) -> None:
        spec = self.spec
        visible, served = (self._visible(item, chunk, tokens), self._served(item)) if masked else (None, None)

        def compute(head):
            q = jnp.concatenate([self.q[:, _lanes(spec, head, query)] for query in range(spec.group)])
            k, v = self.buffers.keys_and_values(head, parity, tokens, q.dtype)
            state = tuple(ref[head] for ref in self.state)
            factor = self.factors[0, head]
            state = attend_chunk(state, q, k, v, visible, scale=factor, soft_cap=spec.soft_cap, served=served)
            for ref, value in zip(self.state, state, strict=True):
                ref[head] = value

        _each_head(spec, compute)

    def _visible(self, item, chunk, tokens: int) -> jax.Array:
        """bool[group * tile, tokens]."""
        shape = (self.spec.group * self.spec.tile, tokens)
        token = self._token(shape)
        position = lax.broadcasted_iota(jnp.int32, shape, 1) + chunk * self.spec.chunking.tokens
        own = token + self.offset[item]
        visible = (position <= own) & (token >= self.first[item]) & (token < self.stop[item])
        if self.spec.chunking.window is not None:
            visible &= position > own - self.spec.chunking.window
        return visible

    def _served(self, item) -> jax.Array:
        """bool[group * tile, lanes], the rows of the item's tokens."""
        token = self._token((self.spec.group * self.spec.tile, self.spec.chunking.layout.lanes))
        return (token >= self.first[item]) & (token < self.stop[item])

    def _token(self, shape: tuple[int, int]) -> jax.Array:
        """i32 of this shape, the token in the flat batch that a row belongs to."""
        return lax.broadcasted_iota(jnp.int32, shape, 0) % self.spec.tile + self.tile * self.spec.tile
