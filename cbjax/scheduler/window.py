"""Decode windows: several steps in one plan, while nothing that the host could decide in between is lost.

That is so if nobody waits, every active request that can run does and decodes, and nobody lacks a block. The blocks of
the whole window are taken when it is planned. A row draws up to its own limit; only an EOS id or a failure ends it
earlier, and then it gives all of its blocks back, so no row that goes on ever holds one in vain.
"""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.state import Field


def open_window(draft: Draft, max_window: int) -> int:
    """Steps that the chosen rows can run at once, at most `max_window`; takes the blocks that they need.

    Halved until the pool has them: a single step has its own already, and its own rules under pressure.
    """
    if len(draft.waiting) or draft.starved or draft.admitted:
        return 1
    rows, slots = draft.rows, np.concatenate(draft.chosen)
    is_prefilled = rows[Field.COMPUTED] >= rows[Field.PREFILL]
    can_run = (rows[Field.ACTIVE] == 1) & (~is_prefilled | (rows[Field.DRAWN] < rows[Field.LIMIT]))
    if not is_prefilled[slots].all() or np.count_nonzero(can_run) > len(slots):
        return 1
    left = rows[Field.LIMIT, slots] - rows[Field.DRAWN, slots]
    window = min(max_window, int(left.max()))
    if any(reach is not None for reach in draft.config.windows):
        # The blocks behind a layer group's window stay until the next plan, as in a prefill of as many tokens.
        window = min(window, int(rows[Field.CHUNK, slots].min()))
    while window > 1 and not _take_blocks(draft, slots, np.minimum(left, window)):
        window //= 2
    return window


def _take_blocks(draft: Draft, slots: np.ndarray, draws: np.ndarray) -> bool:
    """Gives each of `slots` the blocks to compute `draws` more tokens, or changes nothing."""
    rows, block_size, groups = draft.rows, draft.config.block_size, draft.config.num_groups
    lacking = np.maximum(-(-(rows[Field.COMPUTED, slots] + draws) // block_size) - rows[Field.HELD, slots], 0)
    ids = draft.pool.take(int(lacking.sum()) * groups)
    if ids is None:
        return False
    end = 0
    for i in np.flatnonzero(lacking).tolist():
        first, end = end, end + int(lacking[i]) * groups
        draft.grow(int(slots[i]), ids[first:end])
    return True
