"""The response to KV pressure: which starved requests give up their blocks so that the others can go on.

Called only when every active request is starved and no step is in flight. Victims are the newest starved, as many as
the demand needs, never the last active one. What a victim computed goes to host memory if there is room for all of it,
and comes back with it; otherwise it is dropped (a soft reset) and computed again. A request that was evicted and has
gained no token since is spared: `schedule` re-admits it only when all of its known tokens fit, and at most one prefill
is ever half done (nobody is admitted beside one), so the spared ones alone can never starve each other, and the number
of evictions is bounded by the number of tokens generated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.plan import Offload, SoftReset
from cbjax.scheduler.state import Field, known_tokens
from cbjax.scheduler.waiting import Saved, Waiting


class Victims(NamedTuple):
    """Who gave up blocks, in the order in which they were chosen."""

    soft_resets: tuple[SoftReset, ...] = ()
    offloads: tuple[Offload, ...] = ()


def relieve(draft: Draft) -> Victims:
    """Evicts until the demand of the remaining starved requests is free."""
    rows = draft.rows
    starved = dict(draft.starved)
    newest_first = sorted(starved, key=lambda slot: -int(rows[Field.ORDER, slot]))
    waiting: list[Waiting] = []
    soft_resets: list[SoftReset] = []
    offloads: list[Offload] = []
    for slot in newest_first:
        if sum(starved.values()) <= draft.pool.num_free or len(starved) == 1:
            break
        if not rows[Field.EVICTED, slot]:
            del starved[slot]
            back, how = _evict(draft, slot)
            waiting.append(back)
            if isinstance(how, Offload):
                offloads.append(how)
            else:
                soft_resets.append(how)
    draft.waiting = draft.waiting.push_front(waiting[::-1])
    return Victims(tuple(soft_resets), tuple(offloads))


def _evict(draft: Draft, slot: int) -> tuple[Waiting, SoftReset | Offload]:
    """Takes a request off its slot: as it waits from now on, and what becomes of its KV."""
    record = draft.records[slot]
    assert record is not None
    computed = int(draft.rows[Field.COMPUTED, slot])
    outputs = known_tokens(draft.state, slot)[len(record.request.prompt) :]
    outputs.setflags(write=False)
    uid, incarnation = record.request.uid, int(draft.rows[Field.INCARNATION, slot]) + 1
    held = record.table < draft.config.num_blocks
    saved = None
    if 0 < held.sum() <= draft.config.host_blocks - draft.host_used:
        index = np.full(held.shape, -1, np.int32)
        index[held] = np.arange(held.sum(), dtype=np.int32)
        index.setflags(write=False)
        saved = Saved(num_cells=computed, index=index)
        draft.host_used += saved.num_blocks
    ids = draft.release(slot)
    back = Waiting(request=record.request, outputs=outputs, incarnation=incarnation, evicted=True, saved=saved)
    if saved is not None:
        return back, Offload(uid=uid, slot=slot, blocks=ids)
    return back, SoftReset(uid=uid, slot=slot, num_blocks=len(ids), num_tokens=computed)
