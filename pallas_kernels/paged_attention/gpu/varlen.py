"""Varlen: rows with several new tokens, whose keys and values are in the store already.

An item is a tile of a row's new tokens: the query heads of one kv head for each of them are the rows of a matrix, half
of which each of two warpgroups computes with. A third one fetches keys and values for both of them. A row's last items
see most, so items are taken from the last one on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.compat import kernel
from pallas_kernels.paged_attention.gpu.layout import GpuLayout
from pallas_kernels.paged_attention.gpu.plan import TILE, VarlenItems
from pallas_kernels.paged_attention.gpu.ring import Ring, Span, Stage
from pallas_kernels.paged_attention.gpu.softmax import MASKED, base2_scores, next_weights, spread
from pallas_kernels.paged_attention.gpu.transforms import swizzled
from pallas_kernels.paged_attention.gpu.works import each_work

# Warpgroups that compute, and query rows of each: those of the matrix unit.
READERS = 2
ROWS = 64
# Registers of a thread: the program's 65,536, dealt to those that compute and those that fetch.
COMPUTE_REGISTERS = 240
FETCH_REGISTERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """The static side of a varlen kernel.

    Attributes:
      layout: of the store.
      group: query heads of a kv head.
      tokens: of a warpgroup's half of an item; at most `ROWS // group`.
      dtype: of queries, outputs, and what the matrix unit multiplies.
      window, soft_cap: as in `paged_attention`.
      stages: tiles of the ring.
      programs: of the grid; as many as run at a time.
      is_interpreted: weights go through shared memory, since the interpreter has no products of registers.
    """

    layout: GpuLayout
    group: int
    tokens: int
    dtype: jax.typing.DTypeLike
    window: int | None = None
    soft_cap: float | None = None
    stages: int = 3
    programs: int = 132
    is_interpreted: bool = False


def varlen_tile(group: int) -> int:
    """Tokens of an item."""
    return READERS * (ROWS // group)


def varlen(
    spec: Varlen,
    items: VarlenItems,
    q: jax.Array,
    factors: jax.Array,
    sinks: jax.Array,
    table: jax.Array,
    kv: jax.Array,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Attends from the tokens of all items.

    Args:
      spec: sizes.
      items: of the rows.
      q: [items, kv_heads, READERS, ROWS, width] in `spec.dtype`; row `token * group + head` of each half.
      factors: f32[2, kv_heads], what multiplies each head's scores, and its output.
      sinks: f32[kv_heads, ROWS], the logit to base 2 of each row; `MASKED` where there is none.
      table: i32[slots + 1, max_blocks].
      kv: the store; not written.

    Returns:
      Like q. Rows that are no token's, and what lies behind `items.count`, are undefined.
    """
    layout = spec.layout
    ring = Ring(layout=layout, dtype=spec.dtype, stages=spec.stages, readers=READERS)
    context = table.shape[1] * layout.block_size // 2
    pairs = q.size // layout.width * (context if spec.window is None else min(context, spec.window))
    matrices = (READERS, ROWS, layout.width)
    return kernel(
        partial(_kernel, spec, ring),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(spec.programs,),
        grid_names=("program",),
        num_threads=READERS + 1,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM(matrices, spec.dtype, transforms=swizzled(spec.dtype)),
            plgpu.SMEM((READERS, ROWS, TILE), spec.dtype, transforms=swizzled(spec.dtype))
            if spec.is_interpreted
            else None,
            plgpu.Barrier(num_barriers=READERS),
            plgpu.Barrier(num_barriers=READERS),
            ring.scratch(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * layout.width,
            transcendentals=pairs,
            bytes_accessed=2 * q.size * q.dtype.itemsize + items.slot.shape[0] * context * layout.token_bytes,
        ),
        interpret=interpret,
        kernel_name="paged_attention_varlen",
    )(items.count, items.slot, items.tokens, items.position, q, factors, sinks, table, kv)


def _kernel(
    spec: Varlen, ring: Ring, count, slot, tokens, position, q, factors, sinks, table, kv, out, queries, weights,
    queries_there, queries_free, buffers,
) -> None:  # fmt: skip
    """The items of one program, for one kv head each."""
    role = lax.axis_index("role")

    def span(item) -> Span:
        low = jnp.int32(0) if spec.window is None else jnp.maximum(position[item] - (spec.window - 1), 0)
        return Span(first=lax.div(low, TILE) * TILE, low=low, stop=position[item] + tokens[item])

    @pl.when(role == READERS)
    def _():
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

        def fetch(number, item, head, done):
            table_row, seen = slot[item], span(item)
            for reader in range(READERS):

                @pl.when(number >= 1)
                def _(reader=reader):
                    plgpu.barrier_wait(queries_free.at[reader])

                plgpu.copy_gmem_to_smem(q.at[item, head, reader], queries.at[reader], queries_there.at[reader])
            return ring.fetch(buffers, table, kv, table_row, head, seen, done)

        each_work(count[0], spec.layout.num_kv_heads, spec.programs, fetch, backwards=True)

    @pl.when(role < READERS)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

        def attend(number, item, head, done):
            half = _Half(
                spec=spec,
                ring=ring,
                buffers=buffers,
                reader=role,
                queries=queries,
                weights=weights.at[role] if spec.is_interpreted else None,
                factor=factors[0, head],
                span=span(item),
                begin=position[item] + role * spec.tokens,
                stop=position[item] + jnp.minimum(tokens[item], (role + 1) * spec.tokens),
            )
            plgpu.barrier_wait(queries_there.at[role])
            sink = plgpu.load(sinks.at[head], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            total, values = half.run(sink, done)
            values = values * spread(factors[1, head] / total, values.shape, 1)
            # The queries have been read; their place takes the output on its way.
            queries.at[role][...] = values.astype(spec.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries.at[role], out.at[item, head, role])
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(queries_free.at[role])
            return done + half.span.tiles

        each_work(count[0], spec.layout.num_kv_heads, spec.programs, attend, backwards=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """What one warpgroup computes of an item, and the kernel's refs.

    Attributes:
      queries, weights: refs [READERS, ROWS, width] and [ROWS, TILE].
      factor: f32 scalar that multiplies the scores.
      span: of the whole item.
      begin, stop: positions of the first token of this half, and of the one behind its last; it may have none.
    """

    spec: Varlen
    ring: Ring
    buffers: Any
    reader: Any
    queries: Any
    weights: Any
    factor: Any
    span: Span
    begin: Any
    stop: Any

    def run(self, sink, done) -> tuple[jax.Array, jax.Array]:
        """f32[ROWS] sums of weights and f32[ROWS, width] weighted values, where `done` tiles came before."""
        span, width = self.span, self.spec.layout.width
        # Tiles behind the last token of this half are the other one's.
        own = lax.div(jnp.maximum(self.stop - span.first, 0) + (TILE - 1), TILE)
        own = jnp.where(self.stop > self.begin, jnp.minimum(own, span.tiles), 0)

        def tile(number, state):
            at = span.first + number * TILE
            stage = self.ring.wait(self.buffers, span, at, done + number, self.reader)
            state = self._add(stage, at, state)
            self.ring.free(self.buffers, done + number)
            return state

        def pass_by(number, carry):
            self.ring.wait(self.buffers, span, span.first + number * TILE, done + number, self.reader)
            self.ring.free(self.buffers, done + number)
            return carry

        by_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            sink,
            plgpu.layout_cast(jnp.ones(ROWS, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA),
        )
        _, total, values = lax.fori_loop(0, own, tile, state)
        lax.fori_loop(own, span.tiles, pass_by, 0)
        return total, values

    def _add(self, stage: Stage, at, state):
        """The state, f32[ROWS] maximum and sum and f32[ROWS, width] values, with one more tile."""
        maximum, total, values = state

        def products(acc):
            plgpu.wgmma(acc, self.queries.at[self.reader + _in_turn(at)], stage.keys.transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32))
        scores = base2_scores(scores, self.factor, self.spec.soft_cap)
        is_masked = at + (TILE - 1) > self.begin
        if self.spec.window is not None:
            is_masked |= at <= self.stop - 1 - self.spec.window
        scores = lax.cond(is_masked, lambda x: jnp.where(self._is_seen(at), x, MASKED), lambda x: x, scores)
        chunk, maximum, keep = next_weights(scores, maximum, 1)
        total = total * keep + jnp.sum(chunk, axis=1)
        values = values * spread(keep, values.shape, 1)
        return maximum, total, self._plus_weighted(values, chunk.astype(self.spec.dtype), stage.values)

    def _is_seen(self, at) -> jax.Array:
        """bool[ROWS, TILE], of the tile that begins at this position.

        Rows that are no token's may see what is no key: nothing of theirs gets to others, or out.
        """
        shape, layout = (ROWS, TILE), plgpu.Layout.WGMMA
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + _in_turn(at)
        token = self.begin - at + (row if self.spec.group == 1 else lax.div(row, self.spec.group))
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        seen = column <= token
        return seen if self.spec.window is None else seen & (column > token - self.spec.window)

    def _plus_weighted(self, values: jax.Array, weights: jax.Array, v) -> jax.Array:
        if not self.spec.is_interpreted:
            run: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))
            return run(plgpu.WGMMAAccumulatorRef.init(values))
        self.weights[...] = weights
        plgpu.commit_smem()

        def weighted(acc):
            plgpu.wgmma(acc, self.weights, v)
            return acc[...]

        return values + pl.run_scoped(weighted, plgpu.WGMMAAccumulatorRef((ROWS, self.spec.layout.width), jnp.float32))


def _in_turn(at) -> jax.Array:
    """0, which the compiler cannot know, from the position of a tile.

    What it is added to is computed in each turn of the loop over tiles, not once before: descriptors of 256 columns of
    queries would be kept in registers that there are not.
    """
    return lax.shift_right_logical(at, 30)
