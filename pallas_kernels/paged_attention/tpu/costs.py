"""What a decode kernel does, counted: the trips of its loops, and the bytes that it moves.

The compiler counts neither: loops have run-time trip counts, and copies are made by the kernel. So both are told here,
beside the kernel, and `pallas_kernels.aot` puts them together with the compiler's listing.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels.aot.bundles import Trips
from pallas_kernels.paged_attention.tpu.chunks import Chunking
from pallas_kernels.paged_attention.tpu.decode import ROW_TILE, Decode


def decode_trips(spec: Decode, rows: int, context: int) -> tuple[Trips, ...]:
    """The loops of `decode` as they are compiled, where every row has this context."""
    chunking = spec.chunking
    low = 0 if chunking.window is None else max(context - chunking.window, 0)
    first, last = low // chunking.tokens, (context - 1) // chunking.tokens
    blocks = [blocks_in(chunking, low, context, chunk) for chunk in range(first, last + 1)]
    following = sum(blocks[1:]) / max(len(blocks) - 1, 1)
    begins = copy_trips(chunking, blocks[0])
    runs = chunking.layout.num_kv_heads // spec.heads_together
    compute = (Trips(runs),) if runs > 1 else ()
    clear = clear_trips(chunking, (low - first * chunking.tokens) / max(last - first, 1), None)
    full = Trips(last - first, (*copy_trips(chunking, following), *clear, *compute))
    tails, smaller, count = [], 0, context - last * chunking.tokens
    for tokens in chunking.tails:
        is_run = smaller < count <= tokens
        behind = max(tokens - count, 0) // chunking.layout.slab
        tails.append(Trips(float(is_run), (*clear_trips(chunking, 0, behind), *compute)))
        smaller = tokens
    tile = min(ROW_TILE, rows)
    tiles = -(-rows // tile)
    if tiles > 1:  # a core's
        tiles = -(-tiles // spec.cores)
    # Before the first row its first chunk is fetched; these loops are in the grid's, and run once.
    once = tuple(Trips(copies.count / tiles) for copies in begins)
    in_row = (full, *begins, *tails)
    # What runs once is no loop to the compiler.
    in_tile = (*once, *((Trips(tile, in_row),) if tile > 1 else in_row))
    return (Trips(tiles, in_tile),) if tiles > 1 else in_tile


def blocks_in(chunking: Chunking, low: int, high: int, chunk: int) -> int:
    """Blocks of a chunk that hold something of positions `low` to `high`."""
    size, base = chunking.layout.block_size, chunk * chunking.blocks
    return min(base + chunking.blocks, -(-high // size)) - max(base, low // size)


def copy_trips(chunking: Chunking, blocks: float) -> tuple[Trips, ...]:
    """The loops of `ChunkBuffers.start`."""
    together = chunking.copies_together
    if together == 1:
        return (Trips(blocks),)
    return (Trips(blocks // together), Trips(blocks - blocks // together * together))


def clear_trips(chunking: Chunking, before: float, behind: int | None) -> tuple[Trips, ...]:
    """The loops of `ChunkBuffers.clear`: positions before the window, slabs behind the end; None: a full chunk."""
    slab = chunking.layout.slab
    loops = () if chunking.window is None else (Trips(max(before, 0) // slab),)
    if behind is None:
        return () if chunking.window is None else (*loops, Trips(0))
    return (*loops, Trips(behind))


def decode_bytes(spec: Decode, rows: int, context: int, q_dtype: jnp.dtype) -> dict[str, int]:
    """Bytes between HBM and the core: of the blocks read, of the slabs written, and of queries, outputs and ids."""
    layout = spec.chunking.layout
    low = 0 if spec.chunking.window is None else max(context - spec.chunking.window, 0)
    blocks = -(-context // layout.block_size) - low // layout.block_size
    heads = layout.num_kv_heads * spec.group * layout.lanes
    return {
        "kv_read": rows * blocks * layout.block_size * layout.token_bytes,
        "kv_written": rows * layout.slab * layout.token_bytes,
        "rows": rows * (2 * heads * jnp.dtype(q_dtype).itemsize + layout.token_bytes),
        "ids": rows * 4 * math.ceil(context / layout.block_size),
    }
