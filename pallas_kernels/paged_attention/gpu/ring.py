"""A ring of tiles of one head's keys and values in shared memory, filled through the block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.layout import GpuLayout
from pallas_kernels.paged_attention.gpu.plan import TILE
from pallas_kernels.paged_attention.gpu.transforms import SWIZZLE_BYTES, swizzled


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of a row: its tiles begin at `first`, a multiple of `TILE`; seen are those from `low` to `stop`."""

    first: Any
    low: Any
    stop: Any

    @property
    def tiles(self) -> jax.Array:
        """Tiles that hold something seen, `first`'s to `stop`'s."""
        return lax.div(self.stop - self.first + (TILE - 1), TILE)


@dataclass(frozen=True, slots=True)
class Stage:
    """Keys and values of a tile, refs [TILE, width] in the dtype that is computed with."""

    keys: Any
    values: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Static sizes.

    Attributes:
      layout: of the store.
      dtype: that is computed with.
      stages: tiles in the ring.
      readers: warpgroups that read each tile.
    """

    layout: GpuLayout
    dtype: jax.typing.DTypeLike
    stages: int
    readers: int = 1

    @property
    def piece(self) -> int:
        """Tokens of a copy: a block, or the part of one that is a tile."""
        return min(self.layout.block_size, TILE)

    @property
    def is_converted(self) -> bool:
        """The store's dtype is another than the one that is computed with."""
        return jnp.dtype(self.layout.dtype) != jnp.dtype(self.dtype)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of a stage."""
        size = jnp.dtype(self.layout.dtype).itemsize + self.is_converted * jnp.dtype(self.dtype).itemsize
        return 2 * TILE * self.layout.width * size

    def scratch(self) -> dict[str, Any]:
        """Types of the buffers, and of the barriers.

        These say that a tile is there, that what is to be done to it was done, and that its place is free.
        """
        shape, width = (self.stages, TILE, self.layout.width), self.layout.width
        matrix = plgpu.SMEM(shape, self.layout.dtype, transforms=swizzled(self.layout.dtype, width))
        copies = 2 * (TILE // self.piece)
        types = {
            "keys": matrix,
            "values": matrix,
            "there": plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=self.readers, num_barriers=self.stages),
        }
        if self.is_converted:
            matrix = plgpu.SMEM(shape, self.dtype, transforms=swizzled(self.dtype, width))
            types |= {"converted_keys": matrix, "converted_values": matrix}
        if self.readers > 1:
            types["ready"] = plgpu.Barrier(num_barriers=self.stages)
        return types

    def fetch(self, buffers: dict[str, Any], table, kv, slot, head, span: Span, done) -> jax.Array:
        """Fetches the tiles of a span, each once its place is free; `done` tiles came before. Returns the new number.

        A tile always has as many copies. Those that would lie outside of what is seen bring the nearest block that is
        seen once more: the table says nothing of others.
        """
        size, piece = self.layout.block_size, self.piece
        planes = {"keys": head, "values": head + self.layout.num_kv_heads}

        def tile(number, carry):
            place = lax.rem(done + number, self.stages)
            begins = [span.first + number * TILE + part * piece for part in range(TILE // piece)]
            # The ids are on their way while the place is still in use.
            blocks = [self._block(table, slot, span, at) for at in begins]
            pl.when(done + number >= self.stages)(lambda: self._until_free(buffers, place))
            for part, (at, block) in enumerate(zip(begins, blocks, strict=True)):
                inside = pl.multiple_of(lax.rem(at, size), piece) if size > piece else 0
                for name, plane in planes.items():
                    plgpu.copy_gmem_to_smem(
                        kv.at[block, plane, pl.ds(inside, piece)],
                        buffers[name].at[place, pl.ds(part * piece, piece)],
                        buffers["there"].at[place],
                    )
            return carry

        lax.fori_loop(0, span.tiles, tile, 0)
        return done + span.tiles

    def _until_free(self, buffers, place) -> None:
        plgpu.barrier_wait(buffers["free"].at[place])

    def _block(self, table, slot, span: Span, at):
        """Id of the block of a position, or of the nearest one that is seen."""
        size = self.layout.block_size
        return table[slot, jnp.clip(lax.div(at, size), lax.div(span.low, size), lax.div(span.stop - 1, size))]

    def wait(self, buffers: dict[str, Any], span: Span, at, number, reader=0) -> Stage:
        """The tile of this number in the ring, which begins at position `at`, once it is there.

        Values that nobody may see become 0: a weight of 0 does not make a NaN harmless, and a cell that nobody wrote
        may hold one. Where several warpgroups read, the first of them does so, and the others wait for it.
        """
        place = lax.rem(number, self.stages)
        self._until_there(buffers, place)
        stage = self._stage(buffers, place)
        if self.is_converted:
            found = Stage(keys=buffers["keys"].at[place], values=buffers["values"].at[place])
            parts = self._parts()
            columns = self.layout.width // len(parts)

            def convert_part(number, carry):
                part = pl.ds(pl.multiple_of(number * columns, columns), columns)
                stage.keys.at[:, part][...] = self._converted(found.keys.at[:, part])
                stage.values.at[:, part][...] = self._seen(self._converted(found.values.at[:, part]), span, at)
                return carry

            def convert():
                # As a loop: the loads of all parts would be brought forward, into registers that there are not.
                lax.fori_loop(0, len(parts), convert_part, 0)

            self._prepare(buffers, place, reader, convert)
            return stage

        def clear():
            for part in self._parts():
                values = stage.values.at[:, part]
                values[...] = self._seen(plgpu.load(values, layout=plgpu.Layout.WGMMA), span, at)

        is_partial = (at < span.low) | (at + TILE > span.stop)
        pl.when(is_partial)(lambda: self._prepare(buffers, place, reader, clear))
        return stage

    def _until_there(self, buffers, place) -> None:
        plgpu.barrier_wait(buffers["there"].at[place])

    def _stage(self, buffers, place) -> Stage:
        prefix = "converted_" if self.is_converted else ""
        return Stage(keys=buffers[f"{prefix}keys"].at[place], values=buffers[f"{prefix}values"].at[place])

    def _prepare(self, buffers, place, reader, change) -> None:
        """Runs `change()`, which writes to the tile, in the first reader; the others wait for it."""
        if self.readers == 1:
            change()
            plgpu.commit_smem()
            return

        @pl.when(reader == 0)
        def _():
            change()
            plgpu.commit_smem()
            plgpu.barrier_arrive(buffers["ready"].at[place])

        # All of them: who waits for a barrier once has to do so every time.
        plgpu.barrier_wait(buffers["ready"].at[place])

    def _parts(self) -> list[pl.Slice]:
        """Columns of a tile that are changed at a time: few, since the registers are full of other things."""
        part = min(SWIZZLE_BYTES // jnp.dtype(self.layout.dtype).itemsize, self.layout.width)
        return [pl.ds(first, part) for first in range(0, self.layout.width, part)]

    def _converted(self, matrix) -> jax.Array:
        """[TILE, columns] in the dtype that is computed with."""
        found = plgpu.load(matrix, layout=plgpu.Layout.WGMMA, optimized=False)
        # There is no instruction from 8 bits to bfloat16.
        return found.astype(jnp.float32).astype(self.dtype)

    def _seen(self, matrix: jax.Array, span: Span, at) -> jax.Array:
        """matrix [TILE, columns] of the tile that begins at this position; rows that are not seen become 0."""
        position = plgpu.broadcasted_iota(jnp.int32, matrix.shape, 0, layout=plgpu.Layout.WGMMA) + at
        return jnp.where((position >= span.low) & (position < span.stop), matrix, jnp.zeros_like(matrix))

    def free(self, buffers: dict[str, Any], number) -> None:
        """Says that a tile has been read."""
        plgpu.barrier_arrive(buffers["free"].at[lax.rem(number, self.stages)])
