"""A row's keys and values, chunk by chunk: fetched by block into one of two buffers in VMEM.

Chunks have a fixed number of tokens and begin at position 0, whichever kernel reads them and whatever it reads beside,
so that every token's scores are added up in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.layout import KVLayout

# The last chunk is computed with in the smallest of some sizes that its tokens fit, all with the same bits; this one
# at least, since below it the matrix unit waits more than it works.
SMALLEST_TAIL = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Static sizes.

    Attributes:
      layout: of the store.
      tokens: of a chunk; a power of two, a multiple of the block size.
      window: a token sees itself and the `window - 1` tokens before it; None: all before it.
    """

    layout: KVLayout
    tokens: int
    window: int | None = None

    def __post_init__(self) -> None:
        smallest = max(SMALLEST_TAIL, self.layout.block_size)
        if self.tokens < smallest or self.tokens & (self.tokens - 1):
            raise ValueError(f"a chunk is a power of two of tokens, at least {smallest}; got {self.tokens}")

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.tokens // self.layout.block_size

    @property
    def tails(self) -> tuple[int, ...]:
        """Sizes that a last chunk is computed with, smallest first."""
        sizes = [self.tokens]
        while sizes[0] > max(SMALLEST_TAIL, self.layout.block_size):
            sizes.insert(0, sizes[0] // 2)
        return tuple(sizes)

    @property
    def copies_together(self) -> int:
        """Copies started in one go, so that the scalar unit overlaps their addresses."""
        return max(1, min(8, self.blocks // 4))

    def cost(self, queries: int, spans: int, group: int, max_blocks: int) -> pl.CostEstimate:
        """What XLA schedules by, as if rows were half as long as the table is wide, or as the window.

        Args:
          queries: tokens that attend.
          spans: contexts that are read, each for one row or one tile of queries.
          group: query heads of a kv head.
          max_blocks: columns of the table.
        """
        layout = self.layout
        context = max_blocks * layout.block_size // 2
        context = context if self.window is None else min(context, self.window)
        pairs = queries * group * layout.num_kv_heads * context
        return pl.CostEstimate(
            flops=4 * pairs * layout.lanes,
            transcendentals=pairs,
            bytes_accessed=spans * context * layout.token_bytes,
        )

    def scratch(self, max_blocks: int) -> list[Any]:
        """What `ChunkBuffers` works with: two rows' block ids, two chunks, a semaphore for each."""
        layout = self.layout
        return [
            pltpu.SMEM((2, max_blocks), jnp.int32),
            pltpu.VMEM((2, self.blocks, layout.planes, layout.block_size, layout.lanes), layout.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ]


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `low` to `high` of a row, all that some queries see between them."""

    low: jax.Array | int
    high: jax.Array | int

    def first_chunk(self, chunking: Chunking) -> jax.Array | int:
        return self.low // chunking.tokens

    def last_chunk(self, chunking: Chunking) -> jax.Array | int:
        return (self.high - 1) // chunking.tokens


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """The buffers of `Chunking.scratch`, and the store and block tables that fill them.

    A buffer is named by its parity: that of the rows so far for ids, that of the chunks so far for keys and values.
    """

    chunking: Chunking
    table: Any
    store: Any
    ids: Any
    chunks: Any
    ids_semaphores: Any
    chunk_semaphores: Any

    def ids_copy(self, slot, parity):
        """The copy of a row's block ids to scalar memory."""
        return pltpu.make_async_copy(self.table.at[slot], self.ids.at[parity], self.ids_semaphores.at[parity])

    def _blocks(self, span: Span, chunk):
        """Numbers, within the row, of the chunk's blocks that hold something to read."""
        size, base = self.chunking.layout.block_size, chunk * self.chunking.blocks
        first = jnp.maximum(base, span.low // size)
        return base, first, jnp.minimum(base + self.chunking.blocks, pl.cdiv(span.high, size))

    def start(self, span: Span, chunk, ids_parity, parity) -> None:
        """Begins to fetch a chunk: a copy for each block."""
        base, first, stop = self._blocks(span, chunk)
        together = self.chunking.copies_together

        semaphore = self.chunk_semaphores.at[parity]

        def copies(index, carry, count):
            for each in range(count):
                source = self.store.at[self.ids[ids_parity, base + index + each]]
                pltpu.make_async_copy(source, self.chunks.at[parity, index + each], semaphore).start()
            return carry

        begin, count = first - base, jnp.maximum(stop - first, 0)
        rounds = count // together
        lax.fori_loop(0, rounds, lambda i, carry: copies(begin + i * together, carry, together), 0)
        if together > 1:
            lax.fori_loop(begin + rounds * together, begin + count, lambda i, carry: copies(i, carry, 1), 0)

    def wait(self, span: Span, chunk, parity) -> None:
        """Until the chunk is there. The semaphore counts bytes, so one wait is for all copies."""
        _, first, stop = self._blocks(span, chunk)
        count = stop - first
        source, target = self.store.at[pl.ds(0, count)], self.chunks.at[parity, pl.ds(0, count)]
        pltpu.make_async_copy(source, target, self.chunk_semaphores.at[parity]).wait()

    def clear(self, span: Span, chunk, parity, tokens: int) -> None:
        """Zeros in the first `tokens` of a chunk where nothing was fetched, or was written by nobody.

        A weight of 0 does not make a NaN harmless, and a buffer may hold those of others.
        """
        layout = self.chunking.layout
        slab, size = layout.slab, layout.block_size
        zeros = jnp.zeros((layout.planes, slab, layout.lanes), layout.dtype)
        base = chunk * self.chunking.tokens

        def clear_slab(number, carry):
            position = number * slab
            offset = pl.multiple_of(position % size, slab)
            self.chunks[parity, position // size, :, pl.ds(offset, slab)] = zeros
            return carry

        if self.chunking.window is not None:
            lax.fori_loop(0, jnp.clip(span.low - base, 0, tokens) // size * (size // slab), clear_slab, 0)
        lax.fori_loop(pl.cdiv(span.high - base, slab), tokens // slab, clear_slab, 0)

    def keys_and_values(self, head, parity, tokens: int, dtype) -> tuple[jax.Array, jax.Array]:
        """[tokens, lanes] each, of one head, the first tokens of a chunk."""
        layout = self.chunking.layout
        blocks = tokens // layout.block_size

        def plane(number):
            return self.chunks[parity, :blocks, number].reshape(tokens, layout.lanes).astype(dtype)

        k = plane(head)
        return k, k if layout.is_packed else plane(layout.num_kv_heads + head)

    def for_tail(self, count, compute) -> None:
        """Runs `compute(tokens)` for the smallest size of a chunk that `count` tokens fit."""
        smaller = 0
        for tokens in self.chunking.tails:
            fits = (count > smaller) & (count <= tokens)

            def run(_, carry, tokens=tokens):
                compute(tokens)
                return carry

            # A loop rather than a branch: the compiler's listing then tells what is run how often.
            lax.fori_loop(0, fits.astype(jnp.int32), run, 0)
            smaller = tokens
