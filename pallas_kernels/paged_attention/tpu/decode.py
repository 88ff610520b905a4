"""Decode: rows with one new token each, whose keys and values are written on the way.

While one chunk of a row is computed with, the next one is on its way, also over the end of a row. The chunk with the
row's last token is completed in VMEM by its new key and value, and the slab of tokens that they belong to goes back to
its block; nothing waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
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

# Rows whose queries and outputs are moved together.
ROW_TILE = 8
# Heads computed with in one run of instructions, by bytes of a number in the store; more of them do not fit the
# registers, or make the program long and no faster.
HEADS_TOGETHER = {1: 8, 2: 8, 4: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The static side of a decode kernel.

    Attributes:
      chunking: of the keys and values.
      group: query heads of a kv head.
      soft_cap: as in `paged_attention`.
      cores: of the device, among which the rows are divided.
    """

    chunking: Chunking
    group: int
    soft_cap: float | None = None
    cores: int = 1

    @property
    def heads_together(self) -> int:
        """Heads computed with in one run of instructions."""
        heads = self.chunking.layout.num_kv_heads
        most = HEADS_TOGETHER[jnp.dtype(self.chunking.layout.dtype).itemsize]
        return max(count for count in range(1, most + 1) if heads % count == 0)

    def each_head(self, compute: Callable[[Any], None]) -> None:
        """Runs `compute(head)` for every kv head; the matrix unit works on those of a run in turns."""
        heads, together = self.chunking.layout.num_kv_heads, self.heads_together

        def run(number, carry):
            for head in range(together):
                compute(number * together + head)
            return carry

        if together == heads:
            run(0, 0)
        else:
            lax.fori_loop(0, heads // together, run, 0)


def decode(
    spec: Decode,
    next_row: jax.Array,
    slot: jax.Array,
    context: jax.Array,
    q: jax.Array,
    new: jax.Array,
    factors: jax.Array,
    sinks: jax.Array,
    table: jax.Array,
    kv: jax.Array,
    *,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes each row's new key and value, then attends from it.

    Args:
      spec: sizes.
      next_row: i32[rows + 1], the first row from here on that has a context; `rows` if there is none.
      slot: i32[rows], row of `table`.
      context: i32[rows], tokens of the row with the new one; 0 is padding.
      q: [rows, kv_heads, group, lanes]; rows is a multiple of `ROW_TILE` for each core, or at most `ROW_TILE`.
      new: [rows, planes, lanes], the new keys and values in the store's dtype.
      factors: f32[2, kv_heads], what multiplies each head's scores, and its output.
      sinks: f32[kv_heads, group, 128], a logit in every lane; `MASKED` where there is none.
      table: i32[slots + 1, max_blocks].
      kv: the store; donate it.

    Returns:
      [rows, kv_heads, group, lanes] in q's dtype, zeros for padding, and the new store.
    """
    rows, max_blocks = q.shape[0], table.shape[1]
    return pl.pallas_call(
        partial(_kernel, spec),
        grid_spec=_grid(spec, rows, max_blocks),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)],
        input_output_aliases={8: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        cost_estimate=spec.chunking.cost(rows, rows, spec.group, max_blocks),
        interpret=interpret,
        name="paged_attention_decode",
    )(next_row, slot, context, q, new, factors, sinks, table, kv)


def _grid(spec: Decode, rows: int, max_blocks: int) -> pltpu.PrefetchScalarGridSpec:
    """Tiles of rows, divided among the cores; what each is given, and the memory it works with."""
    layout = spec.chunking.layout
    heads, planes, lanes, tile = layout.num_kv_heads, layout.planes, layout.lanes, min(ROW_TILE, rows)
    cores = spec.cores if rows > tile else 1
    tiles = rows // (tile * cores)
    assert rows == tiles * tile * cores, f"rows are padded to a multiple of {tile * cores}; got {rows}"

    def by_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, *shape), lambda core, index, *_: (core * tiles + index, *(0 for _ in shape)))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(cores, tiles),
        in_specs=[
            by_tile(heads, spec.group, lanes),
            by_tile(planes, lanes),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.VMEM),
            anywhere,
            anywhere,
        ],
        out_specs=[by_tile(heads, spec.group, lanes), anywhere],
        scratch_shapes=[
            pltpu.SMEM((2,), jnp.int32),
            pltpu.VMEM((heads, spec.group, LANES), jnp.float32),
            pltpu.VMEM((heads, spec.group, LANES), jnp.float32),
            pltpu.VMEM((heads, spec.group, lanes), jnp.float32),
            pltpu.VMEM((2, planes, layout.slab, lanes), layout.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            *spec.chunking.scratch(max_blocks),
        ],
    )


def _kernel(spec: Decode, next_row, slot, context, q, new, factors, sinks, table, _, out, kv, *scratch):
    """One tile of a core's rows; `progress` in scratch goes from one to the next."""
    progress, *state, slabs, slab_semaphores = scratch[:6]
    buffers = ChunkBuffers(spec.chunking, table, kv, *scratch[6:])
    tile = q.shape[0]
    begin, stop = (core * pl.num_programs(1) * tile for core in (pl.program_id(0), pl.program_id(0) + 1))
    rows = _Rows(spec, stop, next_row, slot, context, q, new, factors, sinks, out, kv, progress, state, slabs,
                 slab_semaphores, buffers)  # fmt: skip
    out[...] = jnp.zeros_like(out)

    @pl.when(pl.program_id(1) == 0)
    def _():
        rows.begin(begin)

    def run(index, carry):
        row = begin + pl.program_id(1) * tile + index
        pl.when(context[row] > 0)(lambda: rows.run(row, index))
        return carry

    lax.fori_loop(0, tile, run, 0)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        rows.end()


@dataclass(frozen=True, slots=True)
class _Rows:
    """A core's rows, which end at `stop`, and the kernel's refs.

    progress: i32[2], chunks and rows so far; their parity says which buffer is whose.
    """

    spec: Decode
    stop: Any
    next_row: Any
    slot: Any
    context: Any
    q: Any
    new: Any
    factors: Any
    sinks: Any
    out: Any
    kv: Any
    progress: Any
    state: Any
    slabs: Any
    slab_semaphores: Any
    buffers: ChunkBuffers

    def span(self, row) -> Span:
        """What a row's new token sees."""
        window, high = self.spec.chunking.window, self.context[row]
        return Span(0 if window is None else jnp.maximum(high - window, 0), high)

    def begin(self, begin) -> None:
        """Before the first row, which is the first that has a context: its first chunk is fetched."""
        self.progress[0] = 0
        self.progress[1] = 0
        first = self.next_row[begin]

        @pl.when(first < self.stop)
        def _():
            self.buffers.ids_copy(self.slot[first], 0).start()
            self._start_row(first, 0, 0)

    def _start_row(self, row, ids_parity, parity) -> None:
        """Begins to fetch a row's first chunk, once its block ids are there."""
        self.buffers.ids_copy(self.slot[row], ids_parity).wait()
        span = self.span(row)
        self.buffers.start(span, span.first_chunk(self.spec.chunking), ids_parity, parity)

    def run(self, row, index) -> None:
        """One row, the one of this index in its tile."""
        chunking, buffers, span = self.spec.chunking, self.buffers, self.span(row)
        done, number, following = self.progress[0], self.progress[1], self.next_row[row + 1]
        ids_parity = number % 2

        @pl.when(following < self.stop)
        def _():
            buffers.ids_copy(self.slot[following], 1 - ids_parity).start()

        self._reset()
        first, last = span.first_chunk(chunking), span.last_chunk(chunking)

        def full_chunk(chunk, carry):
            parity = (done + chunk - first) % 2
            buffers.start(span, chunk + 1, ids_parity, 1 - parity)
            buffers.wait(span, chunk, parity)
            if chunking.window is not None:
                buffers.clear(span, chunk, parity, chunking.tokens)
            self._compute(index, span, chunk, parity, chunking.tokens, masked=chunking.window is not None)
            return carry

        lax.fori_loop(first, last, full_chunk, 0)
        parity = (done + last - first) % 2

        @pl.when(following < self.stop)
        def _():
            self._start_row(following, 1 - ids_parity, 1 - parity)

        buffers.wait(span, last, parity)
        self._write(row, index, number, last, parity)

        def tail(tokens):
            buffers.clear(span, last, parity, tokens)
            self._compute(index, span, last, parity, tokens, masked=True)

        buffers.for_tail(span.high - last * chunking.tokens, tail)
        for head in range(chunking.layout.num_kv_heads):
            mean = finish(self.state[1][head], self.state[2][head]) * self.factors[1, head]
            self.out[index, head] = mean.astype(self.out.dtype)
        self.progress[0] = done + last - first + 1
        self.progress[1] = number + 1

    def _reset(self) -> None:
        maximum, weights, values = self.state
        for head in range(self.spec.chunking.layout.num_kv_heads):
            sink = self.sinks[head]
            maximum[head] = sink
            weights[head] = jnp.where(sink > MASKED, initial_weights(sink.shape), 0.0)
            values[head] = jnp.zeros(values.shape[1:], jnp.float32)

    def _compute(self, index, span: Span, chunk, parity, tokens: int, *, masked: bool) -> None:
        visible = None
        if masked:
            base = chunk * self.spec.chunking.tokens
            position = lax.broadcasted_iota(jnp.int32, (self.spec.group, tokens), 1)
            visible = (position < span.high - base) & (position >= span.low - base)

        def compute(head):
            q = self.q[index, head]
            k, v = self.buffers.keys_and_values(head, parity, tokens, q.dtype)
            state = tuple(ref[head] for ref in self.state)
            state = attend_chunk(state, q, k, v, visible, scale=self.factors[0, head], soft_cap=self.spec.soft_cap)
            for ref, value in zip(self.state, state, strict=True):
                ref[head] = value

        self.spec.each_head(compute)

    def _write(self, row, index, number, chunk, parity) -> None:
        """Puts the row's new key and value into its chunk, and begins to write their slab to its block.

        What the slab holds behind them was written by nobody and becomes 0.
        """
        layout, chunks = self.spec.chunking.layout, self.buffers.chunks
        position = self.context[row] - 1
        block, inside = position // layout.block_size, position % layout.block_size
        offset = pl.multiple_of(inside // layout.slab * layout.slab, layout.slab)
        at = (parity, block - chunk * self.spec.chunking.blocks, slice(None), pl.ds(offset, layout.slab))
        old = chunks[at]
        place = lax.broadcasted_iota(jnp.int32, old.shape, 1) + offset
        before = jnp.where(place < inside, old, jnp.zeros((), old.dtype))
        slab = jnp.where(place == inside, self.new[index][:, None, :], before)
        chunks[at] = slab

        @pl.when(number >= 2)
        def _():
            self._slab_copy(number, 0, 0).wait()

        self.slabs[number % 2] = slab
        self._slab_copy(number, self.buffers.ids[number % 2, block], offset).start()

    def _slab_copy(self, number, block, offset):
        """The copy of a slab, of the row of this number, to its block."""
        size = self.spec.chunking.layout.slab
        target = self.kv.at[block, :, pl.ds(pl.multiple_of(offset, size), size)]
        return pltpu.make_async_copy(self.slabs.at[number % 2], target, self.slab_semaphores.at[number % 2])

    def end(self) -> None:
        """After the last row: its slab and the one before are written."""
        for back in (1, 2):

            @pl.when(self.progress[1] >= back)
            def _(back=back):
                self._slab_copy(self.progress[1] - back, 0, 0).wait()
