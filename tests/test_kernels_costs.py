"""What kernels are said to do, against loops that count it token by token."""

import pytest

from pallas_kernels.aot import Case
from pallas_kernels.aot.cases import build
from pallas_kernels.paged_attention import KVLayout
from pallas_kernels.paged_attention.tpu.chunks import Chunking
from pallas_kernels.paged_attention.tpu.update_costs import update_bytes, update_trips
from pallas_kernels.paged_attention.tpu.varlen import Varlen
from pallas_kernels.paged_attention.tpu.varlen_costs import items_of, varlen_bytes, varlen_trips

LAYOUT = KVLayout(num_kv_heads=2, head_dim=128, block_size=16, num_blocks=1)


def spec(window=None, tile=32):
    return Varlen(chunking=Chunking(layout=LAYOUT, tokens=256, window=window), group=4, tile=tile)


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(("rows", "new", "context"), [(3, 50, 700), (1, 32, 32), (5, 7, 300), (2, 64, 256)])
def test_items_cover_every_new_token_once_and_see_what_it_sees(window, rows, new, context):
    tiles = items_of(spec(window), rows, new, context)
    assert len(tiles) == -(-rows * new // 32)
    items = [item for tile in tiles for item in tile]
    assert sum(item.tokens for item in items) == rows * new
    seen = [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(context - new, context)]
    assert sum(item.pairs for item in items) == rows * sum(map(len, seen))
    for row, first in enumerate(range(0, rows * new, new)):
        own = [item for tile in range(first // 32, (first + new - 1) // 32 + 1) for item in tiles[tile]]
        assert min(item.low for item in own) == seen[0].start, row
        assert max(item.high for item in own) == context, row


def test_a_chunk_is_unmasked_where_a_whole_tile_sees_all_of_it():
    tiles = items_of(spec(), 1, 96, 600)
    assert [item.plain for (item,) in tiles] == [1, 2, 2]  # from positions 504, 536 and 568 on
    assert [item.plain for tile in items_of(spec(), 2, 48, 600) for item in tile] == [2, 0, 0, 2]
    assert all(item.plain == 0 for (item,) in items_of(spec(window=50), 1, 96, 600))


def test_trips_of_a_prefill_are_those_of_its_items():
    """One row of 96 tokens from position 504 on: three items, each of chunks 0, 1 and a part of 2."""
    tiles = items_of(spec(), 1, 96, 600)
    (grid,) = varlen_trips(spec(), tiles)
    assert grid.count == 3
    *begins, reset, items, finish = grid.loops
    assert (reset.count, items.count, finish.count) == (2, 1, 2)
    assert [begin.count for begin in begins] == [4 / 3, 0]  # 16 blocks, 4 at a time
    plain, masked, *begins, tail = items.loops
    assert (plain.count, masked.count, tail.count) == pytest.approx((5 / 3, 1 / 3, 1))
    assert [begin.count for begin in begins] == [4, 0]
    # In each the chunk after is fetched: thrice the 16 blocks of chunk 1, in 4 rounds, and 4 and 6 of chunk 2.
    copies = [(4, 0), (4, 0), (4, 0), (1, 0), (1, 2)]
    assert [loop.count for loop in plain.loops[:2]] == pytest.approx(
        [sum(each) / 5 for each in zip(*copies, strict=True)]
    )


def test_bytes_of_a_prefill_are_those_of_its_blocks_queries_and_ids():
    moved = varlen_bytes(spec(), items_of(spec(), 1, 96, 600), 600, "bfloat16")
    blocks = -(-536 // 16) + -(-568 // 16) + -(-600 // 16)
    assert moved == {"kv_read": blocks * 16 * 1024, "rows": 2 * 96 * 8 * 128 * 2, "ids": 3 * 4 * 38}


@pytest.mark.parametrize(
    ("new", "context", "slabs", "partial"),
    [(16, 32, 1, 0), (16, 40, 2, 2), (3, 40, 1, 1), (30, 30, 2, 1), (20, 32, 2, 1)],
)
def test_an_update_writes_every_slab_and_reads_those_it_does_not_fill(new, context, slabs, partial):
    moved = update_bytes(LAYOUT, 3, new, context)
    slab = 16 * 1024
    assert (moved["kv_written"], moved["kv_read"]) == (3 * slabs * slab, 3 * partial * slab)
    assert update_trips(LAYOUT, 3, new, context)[0].loops[0].count == slabs


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(phase="backward"), "kernels are paged_attention and kv_update"),
        (Case(op="matmul"), "got matmul in decode"),
        (Case(phase="prefill", new_tokens=9, context=8), "1 to context"),
        (Case(phase="prefill", new_tokens=0), "new_tokens must be at least 1"),
        (Case(heads=9, kv_heads=2), "kv heads must divide"),
    ],
)
def test_cases_that_cannot_be_are_refused(case, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        build(case)
