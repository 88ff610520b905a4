"""The response to KV pressure: which starved requests give up their blocks so that the others can go on.

Called only when every active request is starved and no step is in flight. Victims are the newest starved, as many as
the demand needs, never the last active one. A request that was evicted and has gained no token since is spared:
`schedule` re-admits it only when all of its known tokens fit, and at most one prefill is ever half done (nobody is
admitted beside one), so the spared ones alone can never starve each other, and the number of evictions is bounded by
the number of tokens generated.
"""

from __future__ import annotations

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.plan import SoftReset
from cbjax.scheduler.state import Field, known_tokens
from cbjax.scheduler.waiting import Waiting


def relieve(draft: Draft) -> tuple[SoftReset, ...]:
    """Soft-resets victims until the demand of the remaining starved requests is free; returns the victims."""
    rows = draft.rows
    starved = dict(draft.starved)
    newest_first = sorted(starved, key=lambda slot: -int(rows[Field.ORDER, slot]))
    victims = []
    for slot in newest_first:
        if sum(starved.values()) <= draft.pool.num_free or len(starved) == 1:
            break
        if not rows[Field.EVICTED, slot]:
            del starved[slot]
            victims.append(_soft_reset(draft, slot))
    draft.waiting = draft.waiting.push_front([waiting for waiting, _ in reversed(victims)])
    return tuple(reset for _, reset in victims)


def _soft_reset(draft: Draft, slot: int) -> tuple[Waiting, SoftReset]:
    record = draft.records[slot]
    assert record is not None
    computed = int(draft.rows[Field.COMPUTED, slot])
    outputs = known_tokens(draft.state, slot)[len(record.request.prompt) :]
    outputs.setflags(write=False)
    incarnation = int(draft.rows[Field.INCARNATION, slot]) + 1
    ids = draft.release(slot)
    waiting = Waiting(request=record.request, outputs=outputs, incarnation=incarnation, evicted=True)
    reset = SoftReset(uid=record.request.uid, slot=slot, num_blocks=len(ids), num_tokens=computed)
    return waiting, reset
