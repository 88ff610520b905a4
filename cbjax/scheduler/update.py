"""`update` and `cancel`: what the device's answers, or a caller's change of mind, make of a state. Pure."""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.plan import Ended, StepOutputs, StepPlan, StepResults
from cbjax.scheduler.sharing import register
from cbjax.scheduler.state import Chain, Field, Record, SchedulerState


def update(state: SchedulerState, plan: StepPlan, outputs: StepOutputs) -> tuple[SchedulerState, StepResults]:
    """Applies the answers to the oldest plan in flight.

    A row counts only if its request still is what it was when the plan was made, (uid, incarnation): a row that ended
    or was cancelled meanwhile ran in vain and its answer is dropped. A row without finite logits ends with "failed".
    """
    assert state.num_in_flight > 0, "update without a plan in flight"
    batch, draft = plan.batch, Draft(state)
    rows, slot = draft.rows, batch.slot
    same = (rows[Field.UID, slot] == batch.uid) & (rows[Field.INCARNATION, slot] == batch.incarnation)
    live = same & (rows[Field.ACTIVE, slot] == 1)
    failed = live & ~outputs.finite
    emitted = np.flatnonzero(live & batch.emits & outputs.finite)
    slots, tokens = slot[emitted], outputs.tokens[emitted]

    register(draft, slot[live & outputs.finite], (batch.start + batch.count)[live & outputs.finite])
    stops = (tokens[:, None] == draft.eos[slots]).any(axis=1)
    _append(draft, slots, tokens)
    full = rows[Field.LENGTH, slots] - rows[Field.PROMPT, slots] >= rows[Field.LIMIT, slots]

    ended = {}
    for i in np.flatnonzero(failed):
        ended[int(i)] = Ended(uid=int(batch.uid[i]), reason="failed")
    for i, token, stop in zip(emitted[stops | full], tokens[stops | full], stops[stops | full], strict=True):
        ended[int(i)] = Ended(
            uid=int(batch.uid[i]), reason="stop" if stop else "length", token=int(token) if stop else None
        )
    for i in ended:
        draft.release(int(slot[i]))
    results = StepResults(
        uid=batch.uid[emitted],
        tokens=tokens,
        logprobs=outputs.logprobs[emitted],
        ended=tuple(ended[i] for i in sorted(ended)),
    )
    return draft.freeze(num_in_flight=state.num_in_flight - 1, swaps=draft.swaps), results


def _append(draft: Draft, slots: np.ndarray, tokens: np.ndarray) -> None:
    """Adds one known token to each of `slots`; a block that is now full joins the row's chain."""
    if not len(slots):
        return
    rows, block_size = draft.rows, draft.config.block_size
    draft.tail = draft.tail.copy()
    draft.tail[slots, rows[Field.LENGTH, slots] % block_size] = tokens
    rows[Field.LENGTH, slots] += 1
    rows[Field.EVICTED, slots] = 0
    for slot in slots[rows[Field.LENGTH, slots] % block_size == 0].tolist():
        record = draft.records[slot]
        assert record is not None
        block = draft.tail[slot].copy()
        block.setflags(write=False)
        chain = Chain(block, record.chain)
        draft.records[slot] = Record(record.request, record.history, chain, record.table, record.prefix)


def cancel(state: SchedulerState, uid: int) -> tuple[SchedulerState, bool]:
    """Takes a request out, wherever it is; its blocks are free at once, answers still in flight will be dropped.

    Returns:
      The new state, and whether there was such a request.
    """
    if uid in state.waiting:
        draft = Draft(state)
        saved = draft.waiting.entries[uid].saved
        draft.host_used -= 0 if saved is None else saved.num_blocks
        draft.waiting = draft.waiting.remove(uid)
    else:
        slot = state.slot_of(uid)
        if slot is None:
            return state, False
        draft = Draft(state)
        draft.release(slot)
    return draft.freeze(num_in_flight=state.num_in_flight, swaps=draft.swaps), True
