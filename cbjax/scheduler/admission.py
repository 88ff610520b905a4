"""Admission: from the head of the waiting line into slots, as far as budgets and blocks go."""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.blocks import blocks_for, may_admit
from cbjax.scheduler.draft import Draft
from cbjax.scheduler.fork import find_relative, must_wait
from cbjax.scheduler.groups import most_held
from cbjax.scheduler.hit import Hit
from cbjax.scheduler.request import Request
from cbjax.scheduler.sharing import find
from cbjax.scheduler.state import Field, SchedulerState
from cbjax.scheduler.waiting import Waiting


def num_cached(state: SchedulerState, request: Request) -> int:
    """Tokens of a request's prompt that would be found if it were admitted now."""
    waiting = Waiting(request=request, outputs=np.empty(0, np.int32))
    return find(Draft(state), waiting).num_cells


def take_waiting(draft: Draft) -> None:
    """Admits from the head of the line; the first who cannot be admitted ends it, so nobody is overtaken."""
    while draft.tokens_left and draft.rows_left and not (draft.starved or draft.half_done):
        waiting = draft.waiting.head()
        if waiting is None or draft.rows[Field.ACTIVE].all() or not _admit(draft, waiting):
            return


def _admit(draft: Draft, waiting: Waiting) -> bool:
    """Admits a request, with the blocks that were found for it pinned and those of its first chunk taken."""
    config, pool = draft.config, draft.pool
    margin = 0.0 if draft.is_empty else config.safety_margin
    if not may_admit(free=pool.num_free, need=1, num_blocks=config.num_blocks, safety_margin=margin):
        return False
    hit = find_relative(draft, waiting)
    if hit is None:
        if must_wait(draft, waiting):
            return False
        hit = find(draft, waiting)
    chunk = config.chunk_limit(waiting.request.num_cells)
    cells, restored = hit.num_cells, 0
    if waiting.saved is not None:
        restored = int((waiting.saved.restored(hit.num_columns, config.windows, config.block_size) >= 0).sum())
        cells = max(cells, waiting.saved.num_cells)
    count = min(waiting.num_tokens - cells, chunk, draft.tokens_left)
    more = blocks_for(cells + count, config.block_size) - blocks_for(cells, config.block_size)
    need = restored + len(hit.unfinished) + more * config.num_groups
    # One that was evicted comes back only when all its known tokens fit, so that it gains a token before it can be a
    # victim again. No block of a first chunk has left a window when the chunk is computed.
    if waiting.evicted:
        need = max(need, _need_in_full(draft, waiting, hit, chunk))
    free = pool.num_free - int(sum(hit.num_unheld))
    if not may_admit(free=free, need=need, num_blocks=config.num_blocks, safety_margin=margin):
        return False
    slot = draft.admit(waiting, hit)
    given = draft.take_blocks(slot, draft.blocks_wanted(slot, cells + count))
    assert given
    draft.choose_chunk(slot, count)
    return True


def _need_in_full(draft: Draft, waiting: Waiting, hit: Hit, chunk: int) -> int:
    """Blocks beyond those found that suffice until all known tokens are computed."""
    config = draft.config
    need = 0
    for window, unheld in zip(config.windows, hit.num_unheld, strict=True):
        most = most_held(waiting.num_tokens, chunk, window, config.block_size)
        # What was found in a full group stays; what leaves a window comes back only if nobody else holds it.
        need += most - (hit.num_columns if window is None else unheld)
    return need
