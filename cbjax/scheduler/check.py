"""`check(state)`: every invariant that a state can be asked for. Cheap enough for every step of a test."""

from __future__ import annotations

from collections import Counter

import numpy as np

from cbjax.scheduler.blocks import blocks_for
from cbjax.scheduler.eviction_order import PROTECTED, EvictionOrder
from cbjax.scheduler.groups import first_column, most_held
from cbjax.scheduler.state import Field, SchedulerState, known_tokens


def check(state: SchedulerState) -> None:
    """Raises AssertionError, with what is wrong, if the state breaks an invariant."""
    _check_conservation(state)
    _check_index(state)
    _check_waiting(state)
    for slot, record in enumerate(state.records):
        taken = state.rows[Field.ACTIVE, slot] == 1
        assert taken == (record is not None), f"slot {slot}: row and record disagree about being taken"
        if taken:
            _check_row(state, slot)
        else:
            assert not state.rows[:, slot].any(), f"slot {slot} is free and its row is not zero"


def _check_conservation(state: SchedulerState) -> None:
    """Every block is blank, cached or live, and nothing else."""
    pool, num_blocks = state.pool, state.config.num_blocks
    held = Counter(
        block
        for record in state.records
        if record is not None
        for block in record.table.ravel().tolist()
        if block != num_blocks
    )
    ids = np.concatenate([pool.free_ids(), np.array(list(held), np.int32)])
    counts = f"{pool.num_blank} blank + {pool.num_cached} cached + {len(held)} live"
    assert len(ids) == num_blocks, f"{counts} != {num_blocks} blocks"
    assert np.array_equal(np.sort(ids), np.arange(num_blocks)), "a block is free and live, or held twice"
    shared = {block: count for block, count in held.items() if count > 1}
    assert dict(pool.holders.items()) == shared, "the numbers of holders are not those of the tables"


def _check_index(state: SchedulerState) -> None:
    """What can be found is registered; what is cached can be found or was found once; what is shared is full."""
    pool, block_size = state.pool, state.config.block_size
    registered = pool.index.registered()
    assert pool.index.num_registered == len(registered), "the number of registered blocks is not theirs"
    blank = set(pool.blank[: pool.num_blank].tolist())
    for group, found in enumerate(pool.index.found):
        for key, block in found.items():
            assert block in registered, "a block is found that is not registered"
            name = registered[block]
            assert (name.group, name.prefix.key) == (group, key), "a block is found under another's key"
    assert not blank & registered.keys(), "a blank block is registered"
    assert set(pool.cached.blocks().tolist()) <= registered.keys(), "a cached block is not registered"
    _check_order(pool.cached)
    for slot, record in enumerate(state.records):
        if record is not None:
            full = int(state.rows[Field.COMPUTED, slot]) // block_size
            unfinished = record.table[:, full:].ravel().tolist()
            assert not any(block in pool.holders for block in unfinished), "a block that is written to is shared"
            assert not any(block in registered for block in unfinished), "a registered block is written to"


def _check_order(order: EvictionOrder) -> None:
    late, counts = set(order.late), []
    for end, is_protected in ((len(order.marks), False), (len(order.marks) + 1, True)):
        count, last, block = 0, end, int(order.after[end])
        while block != end:
            assert count == 0 or order.before[block] == last, "the order of cached blocks is torn"
            assert (order.marks[block] == PROTECTED) == is_protected, "a cached block is in the other list"
            assert block not in late, "a cached block is listed twice"
            count, last, block = count + 1, block, int(order.after[block])
        assert order.before[end] == last, "the order of cached blocks is torn at its end"
        counts.append(count)
    assert counts[1] == order.num_protected
    assert sum(counts) + len(late) == order.size == len(order.blocks()), "the order of cached blocks has lost some"


def _check_waiting(state: SchedulerState) -> None:
    waiting = [entry.request.uid for entry in state.waiting]
    active = state.rows[Field.UID, state.rows[Field.ACTIVE] == 1].tolist()
    assert len(waiting) == len(state.waiting), "the waiting line lost or doubled an entry"
    assert len(set(waiting + active)) == len(waiting) + len(active), "a request is in two places"
    saved = [entry.saved for entry in state.waiting if entry.saved is not None]
    assert sum(copy.num_blocks for copy in saved) == state.host_used, "host memory is not what the copies take"
    assert state.host_used <= state.config.host_blocks, "more is offloaded than there is room for"


def _check_row(state: SchedulerState, slot: int) -> None:
    record = state.records[slot]
    assert record is not None
    row = {field: int(state.rows[field, slot]) for field in Field}
    outputs = row[Field.LENGTH] - row[Field.PROMPT]
    in_flight = row[Field.DRAWN] - outputs
    assert row[Field.UID] == record.request.uid
    assert row[Field.HELD] == record.table.shape[1] <= state.config.max_blocks_per_request
    assert row[Field.HELD] == blocks_for(row[Field.COMPUTED], state.config.block_size), "blocks held in vain or lacking"
    _check_windows(state, slot)
    assert len(record.history) == row[Field.PREFILL] >= row[Field.PROMPT] > 0
    assert row[Field.COMPUTED] <= row[Field.LENGTH] + max(0, in_flight - 1), "KV beyond what can be known"
    assert 0 <= in_flight <= state.num_in_flight, f"{in_flight} outputs in {state.num_in_flight} steps in flight"
    assert row[Field.DRAWN] <= row[Field.LIMIT], "more outputs scheduled than the limit"
    tokens = known_tokens(state, slot)
    assert len(tokens) == row[Field.LENGTH], "history, chain and tail do not add up to the row's length"
    assert np.array_equal(tokens[: row[Field.PROMPT]], record.request.prompt)
    assert row[Field.REGISTERED] * state.config.block_size <= row[Field.COMPUTED], "an unfinished block is registered"
    for entry in state.swaps:
        held = state.records[entry.slot]
        assert held is not None, "a swap in a slot that is free"
        assert held.table[entry.group, entry.column] == entry.block, "a swap that is not so"


def _check_windows(state: SchedulerState, slot: int) -> None:
    """Each group holds the blocks that the last step could read or write, and no other."""
    config, rows, record = state.config, state.rows, state.records[slot]
    assert record is not None
    computed, swept, chunk = (int(rows[field, slot]) for field in (Field.COMPUTED, Field.SWEPT, Field.CHUNK))
    assert 1 <= chunk <= config.max_batch_tokens, "the request fits the pool with no chunk"
    for group, window in enumerate(config.windows):
        first = first_column(swept, window, config.block_size)
        is_left = record.table[group] == config.num_blocks
        assert is_left[:first].all(), f"group {group} holds a block that has left its window"
        assert not is_left[first:].any(), f"group {group} lacks a block that its window reaches"
        most = most_held(record.request.num_cells, chunk, window, config.block_size)
        assert len(is_left) - first <= most, f"group {group} holds {len(is_left) - first} blocks, at most {most}"
        assert window is None or 0 <= computed - swept <= chunk, "blocks behind the window were not looked for"
