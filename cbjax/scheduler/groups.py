"""Layer groups as the scheduler sees them: a window per group, and how many blocks a request holds in each.

All groups take their blocks from the one pool, and a row has as many table columns in each of them, since they hold the
same positions. A full group keeps every block. In a group with a window, a step whose first new position is `p` reads
nothing before `p - window + 1`, and neither does any later one: blocks that lie wholly before that are released when
the step is planned. Device work is in plan order, so steps in flight have read them before anybody writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from cbjax.scheduler.blocks import blocks_for

# Tokens that a query of the group sees, itself included; None is the whole context.
type Window = int | None


def first_column(position: int, window: Window, block_size: int) -> int:
    """The first table column that a step whose first new token is at `position` reads or writes."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def most_held(num_cells: int, chunk: int, window: Window, block_size: int) -> int:
    """Blocks that a request of `num_cells` tokens holds in one group, at most, if no step computes over `chunk` tokens.

    A step touches its new tokens and the `window - 1` before them; n tokens lie in at most
    ``ceil((n - 1) / block_size) + 1`` blocks. For a chunk of one token this is what comes to be held, exactly.
    """
    whole = blocks_for(num_cells, block_size)
    return whole if window is None else min(whole, blocks_for(chunk + window - 2, block_size) + 1)


def most_columns(windows: Sequence[Window], *, num_blocks: int, block_size: int, limit: int) -> int:
    """Table columns that a request can fill, at most `limit`, if it has all `num_blocks` and runs token by token.

    With n columns it holds `min(n, held)` blocks in a group with a window, n in a full one; the sum is concave in n, so
    the largest n that fits is the best over "the j smallest windows are full, the other groups hold n each".
    """
    held = sorted(blocks_for(window - 1, block_size) + 1 for window in windows if window is not None)
    best = 0
    for j, total in enumerate(accumulate(held, initial=0)):
        if total <= num_blocks:
            growing = len(windows) - j
            best = max(best, (num_blocks - total) // growing if growing else limit)
    return min(best, limit)


def held_together(
    sizes: Iterable[tuple[int, int]], *, windows: Sequence[Window], block_size: int, max_batch_tokens: int
) -> int:
    """Blocks that suffice to hold all of some requests at one time, so that nobody ever lacks one.

    What a step computes is bounded for all rows together, so beyond a token by token run a window's group needs room
    for one step's tokens only.

    Args:
      sizes: (KV cells, number of requests with as many).
    """
    sizes = [(cells, count) for cells, count in sizes if cells]
    total = 0
    for window in windows:
        whole = sum(blocks_for(cells, block_size) * count for cells, count in sizes)
        by_token = sum(most_held(cells, 1, window, block_size) * count for cells, count in sizes)
        total += whole if window is None else min(whole, by_token + blocks_for(max_batch_tokens, block_size))
    return total
