"""`update` and `cancel`: what the device's answers, or a caller's change of mind, make of a state. Pure."""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.draft import Draft, writable
from cbjax.scheduler.plan import Batch, Ended, StepOutputs, StepPlan, StepResults
from cbjax.scheduler.sharing import register
from cbjax.scheduler.state import Chain, Field, Record, SchedulerState


def update(state: SchedulerState, plan: StepPlan, outputs: StepOutputs) -> tuple[SchedulerState, StepResults]:
    """Applies the answers to the oldest plan in flight.

    A row counts only if its request still is what it was when the plan was made, (uid, incarnation): a row that ended
    or was cancelled meanwhile ran in vain and its answer is dropped, and so is what a row drew in a window after its
    end. A row without finite logits ends with "failed".
    """
    batch, draft = plan.batch, Draft(state)
    assert state.in_flight[:1] == (batch.window,), "update of another plan than the oldest in flight"
    # Indices of another dtype than NumPy's own would be converted at every use.
    rows, slot = draft.rows, batch.slot.astype(np.intp)
    same = (rows[Field.UID][slot] == batch.uid) & (rows[Field.INCARNATION][slot] == batch.incarnation)
    live = same & (rows[Field.ACTIVE][slot] == 1)
    stops = (outputs.tokens == draft.eos.take(slot, axis=1)[:, None]).any(axis=0)
    drawn, failed = _drawn(batch, outputs.finite, stops)
    drawn, failed = drawn & live, failed & live
    for i in range(batch.window):
        _append(draft, slot[drawn[i]], outputs.tokens[i, drawn[i]])
    accepted = drawn.sum(axis=0)
    last = np.maximum(accepted - 1, 0)
    # The cell of the last token drawn is not computed, nor is that of a failed step sound.
    sound = live & ((accepted > 0) | ~failed)
    register(draft, slot[sound], (batch.start + batch.count + last)[sound])

    at_limit = rows[Field.LENGTH][slot] - rows[Field.PROMPT][slot] >= rows[Field.LIMIT][slot]
    stopped = stops[0] if batch.window == 1 else stops[last, np.arange(len(slot))]
    ended = []
    for i in (failed | ((accepted > 0) & (stopped | at_limit))).nonzero()[0].tolist():
        ended.append(_end_of(batch, i, int(outputs.tokens[last[i], i]) if stopped[i] else None, failed=failed[i]))
        draft.release(int(slot[i]))
    gained = accepted > 0
    row, step = drawn.T.nonzero()
    results = StepResults(
        uid=batch.uid[gained],
        count=accepted[gained],
        tokens=outputs.tokens[step, row],
        logprobs=outputs.logprobs[step, row],
        ended=tuple(ended),
    )
    return draft.freeze(in_flight=state.in_flight[1:], swaps=draft.swaps), results


def _drawn(batch: Batch, finite: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool[window, rows], which answers are tokens of the row; bool[rows], where it was not finite before its end."""
    if batch.window == 1:
        return batch.emits & finite, ~finite[0]
    runs = np.arange(batch.window)[:, None] < batch.draws
    goes_on = finite & ~stops
    runs[1:] &= np.logical_and.accumulate(goes_on[:-1], axis=0)
    return runs & finite, (runs & ~finite).any(axis=0)


def _end_of(batch: Batch, row: int, stop: int | None, *, failed: bool) -> Ended:
    """How a row ended; `stop` is the id that did it, if one did."""
    uid = int(batch.uid[row])
    if failed:
        return Ended(uid=uid, reason="failed")
    return Ended(uid=uid, reason="length") if stop is None else Ended(uid=uid, reason="stop", token=stop)


def _append(draft: Draft, slots: np.ndarray, tokens: np.ndarray) -> None:
    """Adds one known token to each of `slots`; a block that is now full joins the row's chain."""
    if not len(slots):
        return
    rows, block_size = draft.rows, draft.config.block_size
    draft.tail = writable(draft.tail, draft.state.tail)
    length = rows[Field.LENGTH][slots]
    draft.tail[slots, length % block_size] = tokens
    length += 1
    rows[Field.LENGTH][slots] = length
    rows[Field.EVICTED][slots] = 0
    for slot in slots[length % block_size == 0].tolist():
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
    return draft.freeze(in_flight=state.in_flight, swaps=draft.swaps), True
