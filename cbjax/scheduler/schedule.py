"""`schedule`: from a state to the plan of the next step, or of a window of steps. Pure.

Candidates are active requests in the policy's order, then waiting ones in order of arrival. Three budgets bound a step:
tokens, rows, and blocks. An active request that cannot get its next block is *starved* and waits for this step; only
if nobody at all can run are victims chosen (`cbjax.scheduler.pressure`).
"""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.admission import take_waiting
from cbjax.scheduler.draft import Draft
from cbjax.scheduler.plan import StepPlan, TableDelta
from cbjax.scheduler.pressure import Victims, relieve
from cbjax.scheduler.sliding import release_behind_windows
from cbjax.scheduler.state import Field, SchedulerState
from cbjax.scheduler.window import open_window


def schedule(state: SchedulerState, max_window: int = 1) -> tuple[StepPlan, SchedulerState]:
    """Plans one step, or a window of up to `max_window` (at most `MAX_WINDOW`) where nothing is lost by it.

    Returns:
      The plan and the state in which it counts as in flight. An empty plan (and the state as it was) means that there
      is nothing to run until `update` or `add`; a plan with `drain` that the steps in flight have to be applied first.
    """
    draft = Draft(state)
    release_behind_windows(draft)
    _fill(draft)
    victims = Victims()
    if draft.is_empty and draft.starved:
        if state.in_flight:
            return StepPlan(batch=draft.batch(), table=TableDelta.empty(), drain=True), state
        victims = relieve(draft)
        draft.starved.clear()
        _fill(draft)
        assert not draft.is_empty, "pressure was relieved and still nothing can run"
    if draft.is_empty:
        return StepPlan(batch=draft.batch(), table=TableDelta.empty()), state
    window = open_window(draft, max_window) if max_window > 1 else 1
    batch = draft.batch(window)
    plan = StepPlan(
        batch=batch,
        table=draft.table_delta(),
        soft_resets=victims.soft_resets,
        offloads=victims.offloads,
        restores=tuple(draft.restores),
        copies=draft.copies(),
        admitted=tuple(draft.admitted),
        num_starved=len(draft.starved),
    )
    return plan, draft.freeze(in_flight=(*state.in_flight, window))


def _fill(draft: Draft) -> None:
    for phase in draft.config.policy.active_order:
        _take_decodes(draft) if phase == "decode" else _take_prefills(draft)
    take_waiting(draft)


def _take_decodes(draft: Draft) -> None:
    """One token for every decoding row, oldest first, while tokens, rows and blocks last."""
    if not (draft.tokens_left and draft.rows_left):
        return
    slots = draft.decoding()
    rows, groups = draft.rows, draft.config.num_groups
    lacks = rows[Field.COMPUTED][slots] >= rows[Field.HELD][slots] * draft.config.block_size
    fits = ~lacks | (lacks.cumsum() * groups <= draft.pool.num_free)
    runs = fits.nonzero()[0][: min(draft.tokens_left, draft.rows_left)]
    # Rows behind the last one that the budgets admit were not tried, so they do not starve.
    tried = len(slots) if len(runs) == int(fits.sum()) else (int(runs[-1]) + 1 if len(runs) else 0)
    draft.starved += [(int(slot), groups) for slot in slots[:tried][~fits[:tried]]]
    growing = slots[runs][lacks[runs]].tolist()
    if growing:
        ids = draft.pool.take(len(growing) * groups)
        assert ids is not None
        for slot, new in zip(growing, ids.reshape(-1, groups), strict=True):
            draft.grow(slot, new)
    if len(runs):
        draft.choose(slots[runs], np.ones(len(runs), np.int32))


def _take_prefills(draft: Draft) -> None:
    """The next chunk of every half-done prefill, oldest first."""
    for slot in draft.prefilling():
        if not (draft.tokens_left and draft.rows_left):
            return
        count = draft.chunk(slot)
        wanted = draft.blocks_wanted(slot, int(draft.rows[Field.COMPUTED, slot]) + count)
        if draft.take_blocks(int(slot), wanted):
            draft.choose_chunk(slot, count)
        else:
            draft.starved.append((int(slot), wanted))
