"""What leaves its window: blocks that no step from now on reads go back to the pool (see `cbjax.scheduler.groups`)."""

from __future__ import annotations

import numpy as np

from cbjax.scheduler.draft import Draft
from cbjax.scheduler.state import Field


def release_behind_windows(draft: Draft) -> None:
    """Releases, in every group with a window, the blocks that lie wholly before what the rows' next tokens see.

    To be called before anything else is planned: what is released here can be handed out in the same plan. Only rows
    that a window's edge has carried over the end of a block cost anything.
    """
    config, rows = draft.config, draft.rows
    groups = [g for g, window in enumerate(config.windows) if window is not None]
    if not groups:
        return
    reach = np.array([config.windows[g] for g in groups])[:, None] - 1
    before, now = (np.maximum(rows[at] - reach, 0) // config.block_size for at in (Field.SWEPT, Field.COMPUTED))
    left = [
        draft.leave(int(slot), groups, before[:, slot], now[:, slot]) for slot in np.flatnonzero((now > before).any(0))
    ]
    if left:
        draft.pool.drop(np.concatenate(left))
    rows[Field.SWEPT] = rows[Field.COMPUTED]
