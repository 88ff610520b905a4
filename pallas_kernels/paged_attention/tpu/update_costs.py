"""What an update does, counted as in `costs`: the trips of its loops, and the bytes that it moves."""

from __future__ import annotations

from pallas_kernels.aot.bundles import Trips
from pallas_kernels.paged_attention.tpu.layout import KVLayout


def update_trips(layout: KVLayout, rows: int, new_tokens: int, context: int) -> tuple[Trips, ...]:
    """The loops of `kv_update` as they are compiled, of rows that have as many new tokens and as long a context."""
    slabs, _ = _slabs(layout, new_tokens, context)
    loop = (Trips(slabs),)
    return (Trips(rows, loop),) if rows > 1 else loop  # what runs once is no loop to the compiler


def update_bytes(layout: KVLayout, rows: int, new_tokens: int, context: int) -> dict[str, int]:
    """Bytes between HBM and the core: of slabs written and of those read before, of new tokens, and of block ids."""
    slabs, partial = _slabs(layout, new_tokens, context)
    slab = layout.slab * layout.token_bytes
    return {
        "kv_written": rows * slabs * slab,
        "kv_read": rows * partial * slab,
        "rows": rows * new_tokens * layout.planes * layout.lanes * 4,
        "ids": rows * 4 * -(-context // layout.block_size),
    }


def _slabs(layout: KVLayout, new_tokens: int, context: int) -> tuple[int, int]:
    """Slabs that a row's new tokens lie in, and those of them that they do not fill."""
    begin, end = (context - new_tokens) // layout.slab, -(-context // layout.slab)
    if end - begin == 1:
        return 1, int(new_tokens < layout.slab)
    return end - begin, ((context - new_tokens) % layout.slab > 0) + (context % layout.slab > 0)
