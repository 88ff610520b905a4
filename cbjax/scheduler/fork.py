"""Forks: several continuations of one prompt, which is computed once.

The requests of a family have one prompt. One that is admitted while another of them runs shares the full blocks that
all but the prompt's last token fill, gets a copy of the block that is not full, and computes the last token itself,
from whose logits it samples under its own settings. With nobody of its family to take from, it is a request like any
other.
"""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.groups import first_column
from cbjax.scheduler.hit import Hit
from cbjax.scheduler.state import Field
from cbjax.scheduler.waiting import Waiting


def must_wait(draft: Draft, waiting: Waiting) -> bool:
    """Whether somebody of the family computes just now what `find_relative` could find then."""
    running = _relatives(draft, waiting)
    return bool((draft.rows[Field.COMPUTED, running] < len(waiting.request.prompt) - 1).any())


def find_relative(draft: Draft, waiting: Waiting) -> Hit | None:
    """What can be had from a running request of the family: all but the prompt's last token. None if from nobody."""
    prompt = len(waiting.request.prompt)
    block_size, num_blocks = draft.config.block_size, draft.config.num_blocks
    columns, rest = divmod(prompt - 1, block_size)
    for slot in _relatives(draft, waiting).tolist():
        was_there = draft.rows[Field.ORDER, slot] < draft.state.num_admissions
        if not was_there or draft.rows[Field.COMPUTED, slot] < prompt - 1:
            continue  # what this very plan copies to it cannot be copied on
        record = draft.records[slot]
        assert record is not None
        table = record.table[:, : columns + (rest > 0)].copy()
        first = [first_column(prompt - 1, window, block_size) for window in draft.config.windows]
        if any((table[group, start:] == num_blocks).any() for group, start in enumerate(first)):
            continue  # it has generated further than a window reaches back
        for group, start in enumerate(first):
            table[group, :start] = num_blocks
        registered = min(columns, int(draft.rows[Field.REGISTERED, slot]))
        prefix = record.prefix
        for _ in range(int(draft.rows[Field.REGISTERED, slot]) - registered if prefix is not None else 0):
            assert prefix is not None
            prefix = prefix.parent
        return Hit(
            table=table[:, :columns],
            num_unheld=(0,) * draft.config.num_groups,
            num_registered=registered,
            prefix=prefix,
            num_cells=prompt - 1,
            is_fork=True,
            unfinished=table[:, columns] if rest else np.empty(0, np.int32),
        )
    return None


def _relatives(draft: Draft, waiting: Waiting) -> np.ndarray:
    """Slots of the running requests of the family, of which some were admitted in this very plan.

    None for a prompt of one token, which leaves nothing to share, and for a request that was evicted with more.
    """
    if len(waiting.request.prompt) == 1 or len(waiting.outputs) or waiting.saved is not None:
        return np.empty(0, np.int64)
    found = np.flatnonzero(draft.rows[Field.FAMILY] == waiting.request.family)
    return found[draft.rows[Field.ACTIVE, found] == 1]  # a free slot's row is zero, and so can a family be
