"""The results of a row's items put together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.compat import kernel, store
from pallas_kernels.paged_attention.gpu.softmax import MASKED, spread

# Items that are read at a time, so that one does not wait for the other.
TOGETHER = 4


def merge(
    row_items: jax.Array,
    parts: jax.Array,
    sums: jax.Array,
    sinks: jax.Array,
    dtype: jax.typing.DTypeLike,
    *,
    interpret: Any = None,
) -> jax.Array:
    """The mean of each row's items by their weights, and by those of the sinks, whose values are 0.

    Args:
      row_items: i32[rows + 1], the first item of each row.
      parts: f32[items, kv_heads, width, columns], the result of each item alone.
      sums: f32[items, kv_heads, columns], the logarithm to base 2 of its sum of weights.
      sinks: f32[kv_heads, columns], a logit to base 2; `MASKED` where there is none.
      dtype: of the result.

    Returns:
      [rows, kv_heads, width, columns]; zeros for rows without items.
    """
    rows, (_, heads, width, columns) = row_items.shape[0] - 1, parts.shape
    return kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((rows, heads, width, columns), dtype),
        grid=(rows, heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(flops=4 * parts.size, transcendentals=sums.size, bytes_accessed=4 * parts.size),
        interpret=interpret,
        kernel_name="paged_attention_merge",
    )(row_items, parts, sums, sinks)


def _kernel(row_items, parts, sums, sinks, out) -> None:
    """One row and kv head."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    first, stop = row_items[row], row_items[row + 1]
    width, columns = parts.shape[2:]
    by_column = plgpu.Layout.WGMMA.reduce(0)

    def some(number, state):
        maximum, total, values = state
        begin = first + number * TOGETHER
        found = []
        for index in range(TOGETHER):
            item = jnp.minimum(begin + index, stop - 1)
            logarithm = plgpu.load(sums.at[item, head], layout=by_column, optimized=False)
            # An item that was taken once more counts for nothing.
            logarithm = logarithm + jnp.where(begin + index < stop, 0.0, MASKED)
            found.append((logarithm, plgpu.load(parts.at[item, head], layout=plgpu.Layout.WGMMA, optimized=False)))
        highest = maximum
        for logarithm, _ in found:
            highest = jnp.maximum(highest, logarithm)
        keep = jnp.exp2(maximum - highest)
        total, values = total * keep, values * spread(keep, values.shape, 0)
        for logarithm, part in found:
            weight = jnp.exp2(logarithm - highest)
            total = total + weight
            values = values + part * spread(weight, values.shape, 0)
        return highest, total, values

    sink = plgpu.load(sinks.at[head], layout=by_column, optimized=False)
    state = (
        sink,
        plgpu.layout_cast(jnp.ones(columns, jnp.float32), by_column),
        plgpu.layout_cast(jnp.zeros((width, columns), jnp.float32), plgpu.Layout.WGMMA),
    )
    turns = lax.div(stop - first + (TOGETHER - 1), TOGETHER)
    _, total, values = lax.fori_loop(0, turns, some, state)
    values = values * spread(1.0 / total, values.shape, 0)
    store(out.at[row, head], values.astype(out.dtype))
