"""Prefix sharing: blocks are registered once their tokens are known to be accepted, and found again at admission.

A hit ends at a block's end and leaves at least one token to compute, whose logits are wanted. In a full layer group it
needs every block from the start; in one with a window only those that the next token sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cbjax.scheduler.groups import first_column
from cbjax.scheduler.hit import Hit
from cbjax.scheduler.prefix import Prefix, root
from cbjax.scheduler.state import Field, Record
from cbjax.scheduler.waiting import Waiting

if TYPE_CHECKING:
    from cbjax.scheduler.draft import Draft


def find(draft: Draft, waiting: Waiting) -> Hit:
    """The longest usable prefix of a waiting request's known tokens. Nothing is pinned yet: `Draft.admit` does."""
    config = draft.config
    if not config.shares_blocks:
        return _hit(np.empty((config.num_groups, 0), np.int32), (0,) * config.num_groups, None, 0)
    chain, table = _registered(draft, waiting)
    columns = _usable(table, config.windows, config.block_size, config.num_blocks)
    table = table[:, :columns].copy()
    cells = max(columns * config.block_size, 0 if waiting.saved is None else waiting.saved.num_cells)
    for group, window in enumerate(config.windows):
        table[group, : first_column(cells, window, config.block_size)] = config.num_blocks
    unheld = tuple(sum(draft.pool.is_cached(block) for block in row if block < config.num_blocks) for row in table)
    return _hit(table, unheld, chain[columns], columns * config.block_size)


def _hit(table: np.ndarray, num_unheld: tuple[int, ...], prefix: Prefix | None, num_cells: int) -> Hit:
    return Hit(table, num_unheld, table.shape[1], prefix, num_cells, is_fork=False, unfinished=np.empty(0, np.int32))


def _registered(draft: Draft, waiting: Waiting) -> tuple[list[Prefix], np.ndarray]:
    """The chain of a request's full blocks, and the blocks registered for it; `num_blocks` where there is none.

    Goes on as long as every full group has its block. The chain is made of registered values where there are any, since
    chains that share them are compared in no time.
    """
    config, index = draft.config, draft.pool.index
    known, block_size = waiting.known, config.block_size
    chain = [root(waiting.request.namespace, draft.state.weights_version, config.block_hash)]
    blocks: list[list[int]] = []
    full = [window is None for window in config.windows]
    for start in range(0, (len(known) - 1) // block_size * block_size if not index.is_empty else 0, block_size):
        prefix = chain[-1].extend(known[start : start + block_size], config.block_hash)
        column = [index.find(group, prefix) for group in range(config.num_groups)]
        if any(block is None and sees_all for block, sees_all in zip(column, full, strict=True)):
            break
        chain.append(next((index.name(block).prefix for block in column if block is not None), prefix))
        blocks.append([config.num_blocks if block is None else block for block in column])
    return chain, np.array(blocks, np.int32).reshape(-1, config.num_groups).T


def _usable(table: np.ndarray, windows: tuple[int | None, ...], block_size: int, missing: int) -> int:
    """Columns of the longest hit: every group with a window has the blocks that the token after it sees."""
    columns = table.shape[1]
    while columns:
        holes = [
            start + np.flatnonzero(row[start:columns] == missing)
            for row, window in zip(table, windows, strict=True)
            for start in [first_column(columns * block_size, window, block_size)]
        ]
        last = max((int(where[-1]) for where in holes if len(where)), default=None)
        if last is None:
            break
        columns = last
    return columns


def register(draft: Draft, slots: np.ndarray, cells: np.ndarray) -> None:
    """Registers the blocks of `slots` that lie wholly within their first `cells` tokens, all of them accepted.

    A block whose content was registered before is given up for the registered one.
    """
    if not draft.config.shares_blocks:
        return
    columns, registered = cells // draft.config.block_size, draft.rows[Field.REGISTERED]
    first = registered[slots]
    gains = columns > first
    slots, first, columns = slots[gains], first[gains], columns[gains]
    registered[slots] = columns
    for slot, start, end in zip(slots.tolist(), first.tolist(), columns.tolist(), strict=True):
        record = draft.records[slot]
        assert record is not None
        prefix = record.prefix
        if prefix is not None:
            for column, blocks in enumerate(record.table[:, start:end].T.tolist(), start):
                prefix = _register_column(draft, slot, record, column, blocks, prefix)
            record = draft.records[slot]  # with the swaps
            assert record is not None
            draft.records[slot] = Record(record.request, record.history, record.chain, record.table, prefix)


def _register_column(draft: Draft, slot: int, record: Record, column: int, blocks: list[int], before: Prefix) -> Prefix:
    """Registers the blocks of one column, one per group; returns the chain up to and with it, given the one before."""
    missing = draft.config.num_blocks
    prefix = before.extend(_tokens_of(draft, slot, record, column), draft.config.block_hash)
    was_known = (column + 1) * draft.config.block_size <= len(record.history)
    for group, block in enumerate(blocks):
        if block != missing:
            held = draft.pool.register(block, group, prefix, was_known=was_known)
            if held != block:
                prefix = draft.pool.index.name(held).prefix
                draft.swap(slot, group, column, held)
    return prefix


def _tokens_of(draft: Draft, slot: int, record: Record, column: int) -> np.ndarray:
    """i32[block_size], the tokens of a full block of a row."""
    block_size = draft.config.block_size
    end = (column + 1) * block_size
    if end <= len(record.history):
        return record.history[end - block_size : end]
    chain = record.chain
    for _ in range(int(draft.rows[Field.LENGTH, slot]) // block_size - 1 - column):
        assert chain is not None
        chain = chain.before
    assert chain is not None
    return chain.tokens
