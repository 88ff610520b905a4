"""What a request that is admitted finds already computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbjax.scheduler.prefix import Prefix


class Hit(NamedTuple):
    """Blocks that a request takes over.

    Attributes:
      table: i32[groups, columns], full blocks to share; `num_blocks` where the group's window no longer reaches.
      num_unheld: per group, how many of them nobody holds; pinning these makes the pool smaller.
      num_registered: columns that are registered.
      prefix: the chain of these; None if the request registers nothing.
      num_cells: tokens whose KV is in the blocks.
      is_fork: they are a running request's with the same prompt.
      unfinished: i32[groups], the blocks with the rest of these, to be copied; i32[0] if there is no rest.
    """

    table: np.ndarray
    num_unheld: tuple[int, ...]
    num_registered: int
    prefix: Prefix | None
    num_cells: int
    is_fork: bool
    unfinished: np.ndarray

    @property
    def num_columns(self) -> int:
        """Columns of `table`, which is blocks in each group that sees everything."""
        return self.table.shape[1]
