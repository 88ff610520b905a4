"""The new keys and values of rows with several new tokens, written to their blocks.

A slab, the tokens of one tile in memory, is written as a whole. One that begins or ends with tokens of earlier steps is
read, completed, and written back.
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

from pallas_kernels.paged_attention.tpu.layout import KVLayout


def kv_update(
    layout: KVLayout,
    slot: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    offset: jax.Array,
    new: jax.Array,
    table: jax.Array,
    kv: jax.Array,
    *,
    interpret: Any = False,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Writes tokens `first` to `stop` of each row at the positions that are their indices plus `offset`.

    Args:
      layout: of the store.
      slot: i32[rows], row of `table`.
      first, stop: i32[rows], tokens in the flat batch; none where `stop` is not behind `first`.
      offset: i32[rows].
      new: [tokens, planes, lanes] f32, of values that the store's dtype has.
      table: i32[slots + 1, max_blocks].
      kv: the store; donate it.

    Returns:
      The new store.
    """
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    slab = (layout.planes, layout.slab, layout.lanes)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(1,),
        in_specs=[anywhere, anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            pltpu.SMEM((1, table.shape[1]), jnp.int32),
            pltpu.VMEM((2, layout.slab, layout.planes, layout.lanes), jnp.float32),
            pltpu.VMEM((2, *slab), layout.dtype),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    return pl.pallas_call(
        partial(_kernel, layout),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True),
        # The new tokens come in, and go out with what else is in their slabs.
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=3 * new.size * new.dtype.itemsize),
        interpret=interpret,
        name="paged_attention_kv_update",
    )(slot, first, stop, offset, new, table, kv)


def _kernel(layout: KVLayout, slot, first, stop, offset, new, table, _, kv, *scratch):
    ids, tokens, slabs, ids_semaphore, token_semaphores, read_semaphores, write_semaphores = scratch

    def row_in(row, count):
        return lax.cond(stop[row] > first[row], lambda: run_row(row, count), lambda: count)

    def run_row(row, count):
        copy = pltpu.make_async_copy(table.at[pl.ds(slot[row], 1)], ids, ids_semaphore)
        copy.start()
        copy.wait()
        one = _Slabs(
            layout=layout,
            low=first[row] + offset[row],
            high=stop[row] + offset[row],
            offset=offset[row],
            count=count,
            new=new,
            kv=kv,
            ids=ids,
            tokens=tokens,
            slabs=slabs,
            token_semaphores=token_semaphores,
            read_semaphores=read_semaphores,
            write_semaphores=write_semaphores,
        )
        one.start(one.begin)

        def slab_in(number, carry):
            @pl.when(number + 1 < one.end)
            def _():
                one.start(number + 1)

            one.finish(number)
            return carry

        lax.fori_loop(one.begin, one.end, slab_in, 0)
        return count + one.end - one.begin

    count = lax.fori_loop(0, slot.shape[0], row_in, 0)
    for back in (1, 2):

        @pl.when(count >= back)
        def _(back=back):
            _write(layout, slabs, kv, write_semaphores, (count - back) % 2, 0, 0).wait()


def _write(layout: KVLayout, slabs, kv, semaphores, parity, block, inside):
    target = kv.at[block, :, pl.ds(pl.multiple_of(inside, layout.slab), layout.slab)]
    return pltpu.make_async_copy(slabs.at[parity], target, semaphores.at[parity])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slabs:
    """The slabs of one row, which are numbered from position 0, and the kernel's refs.

    low, high: positions of the new tokens; offset: what a token's index lacks to its position; count: slabs of the rows
    before, so that its parity and a slab's number say which buffer is whose.
    """

    layout: KVLayout
    low: Any
    high: Any
    offset: Any
    count: Any
    new: Any
    kv: Any
    ids: Any
    tokens: Any
    slabs: Any
    token_semaphores: Any
    read_semaphores: Any
    write_semaphores: Any

    @property
    def begin(self):
        """The first slab."""
        return self.low // self.layout.slab

    @property
    def end(self):
        """Behind the last one."""
        return pl.cdiv(self.high, self.layout.slab)

    def _parity(self, number):
        return (self.count + number - self.begin) % 2

    def _range(self, number):
        """Rows of the slab that are new."""
        base = number * self.layout.slab
        return jnp.maximum(self.low - base, 0), jnp.minimum(self.high - base, self.layout.slab)

    def _tokens(self, number):
        parity, base = self._parity(number), number * self.layout.slab
        begin, end = self._range(number)
        source = self.new.at[pl.ds(base + begin - self.offset, end - begin)]
        target = self.tokens.at[parity, pl.ds(begin, end - begin)]
        return pltpu.make_async_copy(source, target, self.token_semaphores.at[parity])

    def _place(self, number):
        position = number * self.layout.slab
        return self.ids[0, position // self.layout.block_size], position % self.layout.block_size

    def _read(self, number):
        block, inside = self._place(number)
        parity = self._parity(number)
        source = self.kv.at[block, :, pl.ds(pl.multiple_of(inside, self.layout.slab), self.layout.slab)]
        return pltpu.make_async_copy(source, self.slabs.at[parity], self.read_semaphores.at[parity])

    def _is_partial(self, number):
        begin, end = self._range(number)
        return end - begin < self.layout.slab

    def start(self, number) -> None:
        """Begins to fetch what a slab is made of, once its buffer is free."""

        @pl.when(self.count + number - self.begin >= 2)
        def _():
            _write(self.layout, self.slabs, self.kv, self.write_semaphores, self._parity(number), 0, 0).wait()

        self._tokens(number).start()
        pl.when(self._is_partial(number))(lambda: self._read(number).start())

    def finish(self, number) -> None:
        """Completes a slab and begins to write it."""
        parity, (begin, end) = self._parity(number), self._range(number)
        self._tokens(number).wait()
        pl.when(self._is_partial(number))(lambda: self._read(number).wait())
        shape = (self.layout.slab, self.layout.lanes)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        is_new = (row >= begin) & (row < end)
        for plane in range(self.layout.planes):
            fresh = self.tokens[parity, :, plane].astype(self.layout.dtype)
            old = self.slabs[parity, plane]
            self.slabs[parity, plane] = jnp.where(is_new, fresh, jnp.where(row < begin, old, jnp.zeros_like(old)))
        block, inside = self._place(number)
        _write(self.layout, self.slabs, self.kv, self.write_semaphores, parity, block, inside).start()
