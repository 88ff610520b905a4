"""The new keys and values of a step, written to their cells."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.compat import kernel
from pallas_kernels.paged_attention.gpu.layout import GpuLayout

# Tokens that a program has on their way at a time.
TOGETHER = 4
# Bytes of shared memory that they may take.
MOST_BYTES = 160 * 1024


def kv_update(
    layout: GpuLayout,
    block: jax.Array,
    offset: jax.Array,
    new: jax.Array,
    kv: jax.Array,
    *,
    programs: int,
    interpret: Any = None,
) -> jax.Array:
    """Writes each token to its cell, one copy in and one copy out for all its heads.

    Args:
      layout: of the store.
      block, offset: i32[tokens], the cell; a block of -1 is not written.
      new: [tokens, planes, width] in the store's dtype.
      kv: the store; donate it.
      programs: of the grid; a few per multiprocessor, at most one per token.
      interpret: for `plgpu.kernel`.

    Returns:
      The new store.
    """
    store = jax.new_ref(kv)
    together = max(1, min(TOGETHER, MOST_BYTES // layout.token_bytes))
    kernel(
        partial(_kernel, layout, programs, together),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((together, layout.planes, layout.width), layout.dtype),
            plgpu.Barrier(num_barriers=together),
        ],
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * new.size * new.dtype.itemsize),
        interpret=interpret,
        kernel_name="paged_attention_kv_update",
    )(block, offset, new, store)
    return jax.freeze(store)


def _kernel(layout: GpuLayout, programs: int, together: int, block, offset, new, kv, cells, arrived) -> None:
    """Tokens `program`, `program + programs` and so on, some of them at a time."""
    tokens = block.shape[0]
    program = lax.axis_index("program")

    @pl.loop(0, -(-tokens // (programs * together)))
    def _(turn):
        chosen = [program + (turn * together + place) * programs for place in range(together)]
        # A look behind the end is one at the last token, which is then not written here.
        wanted = [(token < tokens) & (block[jnp.minimum(token, tokens - 1)] >= 0) for token in chosen]

        for place, token in enumerate(chosen):

            @pl.when(wanted[place])
            def _(place=place, token=token):
                plgpu.copy_gmem_to_smem(new.at[token], cells.at[place], arrived.at[place])

        for place, token in enumerate(chosen):

            @pl.when(wanted[place])
            def _(place=place, token=token):
                plgpu.barrier_wait(arrived.at[place])
                plgpu.copy_smem_to_gmem(cells.at[place], kv.at[block[token], :, offset[token]])

        # Before the next ones take their places.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.wait_smem_to_gmem(0)
