"""What a varlen kernel does, counted as in `costs`: the trips of its loops, and the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.aot.bundles import Trips
from pallas_kernels.paged_attention.tpu.costs import blocks_in, clear_trips, copy_trips
from pallas_kernels.paged_attention.tpu.varlen import Varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Some tokens of a row in one tile.

    Attributes:
      tokens: how many.
      low, high: positions that they see between them.
      pairs: of a token and a position that it sees.
      plain: chunks from the first one on that are computed with unmasked.
    """

    tokens: int
    low: int
    high: int
    pairs: int
    plain: int


def items_of(spec: Varlen, rows: int, new_tokens: int, context: int) -> list[list[Item]]:
    """The items of each tile, of rows that have as many new tokens, the last of as long a context."""
    tokens, offset = rows * new_tokens, context - new_tokens
    tiles: list[list[Item]] = [[] for _ in range(-(-tokens // spec.tile))]
    for row in range(rows):
        start, end = row * new_tokens, (row + 1) * new_tokens
        for tile in range(start // spec.tile, (end - 1) // spec.tile + 1):
            first, stop = max(start, tile * spec.tile), min(end, (tile + 1) * spec.tile)
            tiles[tile].append(_item(spec, first - start + offset, stop - start + offset))
    return tiles


def _item(spec: Varlen, first: int, stop: int) -> Item:
    """The item of a row's tokens at these positions."""
    size, window = spec.chunking.tokens, spec.chunking.window
    low = 0 if window is None else max(first - window + 1, 0)
    plain = 0
    if window is None and stop - first == spec.tile:
        plain = min((first + 1) // size, (stop - 1) // size)
    seen = (min(position + 1, window or position + 1) for position in range(first, stop))
    return Item(tokens=stop - first, low=low, high=stop, pairs=sum(seen), plain=plain)


def varlen_trips(spec: Varlen, tiles: list[list[Item]]) -> tuple[Trips, ...]:
    """The loops of `varlen` as they are compiled. The trips of those in loops are averages."""
    chunking, heads = spec.chunking, spec.chunking.layout.num_kv_heads
    items = [item for tile in tiles for item in tile]
    each_head = (Trips(heads),) if heads > 1 else ()
    begins = _average(copy_trips(chunking, _blocks(spec, item, item.low // chunking.tokens)) for item in items)
    kinds = ("masked",) if chunking.window is not None else ("plain", "masked")
    in_item = (
        *(_chunk_loop(spec, items, kind, each_head) for kind in kinds),
        *begins,
        *(_tail_loop(spec, items, tokens, each_head) for tokens in chunking.tails),
    )
    count = len(tiles) // spec.cores if len(tiles) % spec.cores == 0 else len(tiles)
    # Before the first item its first chunk is fetched; these loops are in the grid's, and run once.
    once = tuple(Trips(trips.count / count) for trips in begins)
    in_tile = (*once, *each_head, Trips(len(items) / len(tiles), in_item), *each_head)
    return (Trips(count, in_tile),) if count > 1 else in_tile


def _chunk_loop(spec: Varlen, items: list[Item], kind: str, each_head: tuple[Trips, ...]) -> Trips:
    """The loop over an item's chunks before its last one, those computed with unmasked or the others."""
    size, window = spec.chunking.tokens, spec.chunking.window
    copies, clears = [], []
    for item in items:
        first, last = item.low // size, (item.high - 1) // size
        plain = max(item.plain, first)
        for chunk in range(first, plain) if kind == "plain" else range(plain, last):
            copies.append(copy_trips(spec.chunking, _blocks(spec, item, chunk + 1)))
            clears.append(clear_trips(spec.chunking, item.low - chunk * size, None))
    count = len(copies)
    if not count:  # which loops there are is known, how often they are run does not matter
        copies, clears = [copy_trips(spec.chunking, 0)], [clear_trips(spec.chunking, 0, None)]
    return Trips(count / len(items), (*_average(copies), *(_average(clears) if window else ()), *each_head))


def _tail_loop(spec: Varlen, items: list[Item], tokens: int, each_head: tuple[Trips, ...]) -> Trips:
    """What runs for those items whose last chunk is computed with in this size."""
    chunking = spec.chunking
    clears = []
    for item in items:
        last = (item.high - 1) // chunking.tokens
        count = item.high - last * chunking.tokens
        if next(size for size in chunking.tails if count <= size) == tokens:
            before = min(max(item.low - last * chunking.tokens, 0), tokens)
            clears.append(clear_trips(chunking, before, (tokens - count) // chunking.layout.slab))
    return Trips(len(clears) / len(items), (*_average(clears or [clear_trips(chunking, 0, 0)]), *each_head))


def _blocks(spec: Varlen, item: Item, chunk: int) -> int:
    return blocks_in(spec.chunking, item.low, item.high, chunk)


def _average(trips: Iterable[tuple[Trips, ...]]) -> tuple[Trips, ...]:
    return tuple(Trips(sum(each.count for each in place) / len(place)) for place in zip(*trips, strict=True))


def varlen_bytes(spec: Varlen, tiles: list[list[Item]], context: int, q_dtype: jnp.dtype) -> dict[str, int]:
    """Bytes between HBM and the core: of the blocks read, of queries and outputs, and of block ids."""
    layout, items = spec.chunking.layout, [item for tile in tiles for item in tile]
    blocks = sum(-(-item.high // layout.block_size) - item.low // layout.block_size for item in items)
    width = layout.num_kv_heads * spec.group * layout.lanes
    return {
        "kv_read": blocks * layout.block_size * layout.token_bytes,
        "rows": 2 * len(tiles) * spec.tile * width * jnp.dtype(q_dtype).itemsize,
        "ids": len(items) * 4 * math.ceil(context / layout.block_size),
    }
