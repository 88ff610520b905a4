"""Decode: rows with one new token each, over contexts that are cut into items.

Scores are computed transposed, tokens of the context by query heads: so the matrix unit's 64 rows are tokens, however
few query heads share a kv head, and the queries are its narrow side. One warpgroup of a program fetches keys and
values, tile by tile into a ring, also over the end of an item; the other one computes.
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

from pallas_kernels.paged_attention.gpu.compat import kernel, store
from pallas_kernels.paged_attention.gpu.layout import GpuLayout
from pallas_kernels.paged_attention.gpu.plan import TILE, DecodeItems
from pallas_kernels.paged_attention.gpu.ring import Ring, Span
from pallas_kernels.paged_attention.gpu.softmax import MASKED, base2_scores, next_weights, spread
from pallas_kernels.paged_attention.gpu.transforms import swizzled
from pallas_kernels.paged_attention.gpu.works import each_work

# The matrix unit's narrow side is a multiple of this.
COLUMNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The static side of a decode kernel.

    Attributes:
      layout: of the store.
      group: query heads of a kv head.
      dtype: of queries, and of what the matrix unit multiplies.
      soft_cap: as in `paged_attention`.
      stages: tiles of the ring.
      programs: of the grid; as many as run at a time.
    """

    layout: GpuLayout
    group: int
    dtype: jax.typing.DTypeLike
    soft_cap: float | None = None
    stages: int = 3
    programs: int = 264

    @property
    def columns(self) -> int:
        """Query heads of a kv head, and padding."""
        return -(-self.group // COLUMNS) * COLUMNS


def decode(
    spec: Decode,
    items: DecodeItems,
    q: jax.Array,
    factors: jax.Array,
    table: jax.Array,
    kv: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each row's token to what its items see; the store has the token's own key and value already.

    Args:
      spec: sizes.
      items: of the rows.
      q: [rows, kv_heads, columns, width] in `spec.dtype`.
      factors: f32[2, kv_heads], what multiplies each head's scores, and its output.
      table: i32[slots + 1, max_blocks].
      kv: the store; not written.

    Returns:
      f32[items, kv_heads, width, columns], what each item alone would put out, and f32[items, kv_heads, columns], the
      logarithm to base 2 of its sum of weights. What lies behind `items.count` is undefined.
    """
    layout = spec.layout
    heads, width, columns, number = layout.num_kv_heads, layout.width, spec.columns, items.row.shape[0]
    ring = Ring(layout=layout, dtype=spec.dtype, stages=spec.stages)
    context = min(table.shape[1] * layout.block_size, number * TILE)
    pairs = number * heads * columns * context
    return kernel(
        partial(_kernel, spec, ring),
        out_type=[
            jax.ShapeDtypeStruct((number, heads, width, columns), jnp.float32),
            jax.ShapeDtypeStruct((number, heads, columns), jnp.float32),
        ],
        grid=(spec.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((2, columns, width), spec.dtype, transforms=swizzled(spec.dtype)),
            plgpu.SMEM((columns, TILE), spec.dtype, transforms=swizzled(spec.dtype)),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            ring.scratch(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * width, transcendentals=pairs, bytes_accessed=q.shape[0] * context * layout.token_bytes
        ),
        interpret=interpret,
        kernel_name="paged_attention_decode",
    )(items.count, items.row, items.slot, items.first, items.low, items.stop, q, factors, table, kv)


def _kernel(
    spec: Decode, ring: Ring, count, row, slot, first, low, stop, q, factors, table, kv, out, sums, queries, weights,
    queries_there, queries_free, buffers,
) -> None:  # fmt: skip
    """The items of one program, for one kv head each."""

    def span(item) -> Span:
        return Span(first=first[item], low=low[item], stop=stop[item])

    @pl.when(lax.axis_index("role") == 1)
    def _():
        def fetch(number, item, head, done):
            place, batch_row, table_row, seen = lax.rem(number, 2), row[item], slot[item], span(item)

            @pl.when(number >= 2)
            def _():
                plgpu.barrier_wait(queries_free.at[place])

            plgpu.copy_gmem_to_smem(q.at[batch_row, head], queries.at[place], queries_there.at[place])
            return ring.fetch(buffers, table, kv, table_row, head, seen, done)

        each_work(count[0], spec.layout.num_kv_heads, spec.programs, fetch)

    @pl.when(lax.axis_index("role") == 0)
    def _():
        def attend(number, item, head, done):
            place, seen = lax.rem(number, 2), span(item)
            score_factor, value_factor = factors[0, head], factors[1, head]
            plgpu.barrier_wait(queries_there.at[place])
            done, (maximum, total, mean) = _attend(
                spec, ring, buffers, queries.at[place], weights, score_factor, seen, done
            )
            plgpu.barrier_arrive(queries_free.at[place])
            sum_ = jnp.sum(total, axis=0)
            mean = mean * spread(value_factor / sum_, mean.shape, 0)
            store(out.at[item, head], mean)
            store(sums.at[item, head], maximum + jnp.log2(sum_))
            return done

        each_work(count[0], spec.layout.num_kv_heads, spec.programs, attend)


def _attend(spec: Decode, ring: Ring, buffers, queries, weights, factor, seen: Span, done):
    """One item: tiles so far, and the state, maximum f32[columns], weights f32[TILE, columns] yet to be added up, and
    weighted values f32[width, columns]."""
    shape, width = (TILE, spec.columns), spec.layout.width
    by_column = plgpu.Layout.WGMMA.reduce(0)

    def tile(number, state):
        maximum, total, values = state
        at = seen.first + number * TILE
        stage = ring.wait(buffers, seen, at, done + number)

        def products(acc):
            plgpu.wgmma(acc, stage.keys, queries.transpose((1, 0)))
            return acc[...]

        scores = base2_scores(
            pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)), factor, spec.soft_cap
        )
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + at
        scores = jnp.where((position >= seen.low) & (position < seen.stop), scores, MASKED)
        chunk, maximum, keep = next_weights(scores, maximum, 0)
        store(weights.transpose((1, 0)), chunk.astype(spec.dtype))
        plgpu.commit_smem()

        def weighted(acc):
            plgpu.wgmma(acc, stage.values.transpose((1, 0)), weights.transpose((1, 0)))
            return acc[...]

        new = pl.run_scoped(weighted, plgpu.WGMMAAccumulatorRef((width, spec.columns), jnp.float32))
        ring.free(buffers, done + number)
        return maximum, total * spread(keep, shape, 0) + chunk, values * spread(keep, values.shape, 0) + new

    state = (
        plgpu.layout_cast(jnp.full(spec.columns, MASKED, jnp.float32), by_column),
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.zeros((width, spec.columns), jnp.float32), plgpu.Layout.WGMMA),
    )
    tiles = seen.tiles
    return done + tiles, lax.fori_loop(0, tiles, tile, state)
