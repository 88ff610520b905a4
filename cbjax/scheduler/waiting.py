"""The waiting line, as a persistent value: evicted requests first, then fresh ones in order of submission.

Invariant: a uid at the head of either line is always in `entries`; uids further back may have been cancelled, and are
skipped when they reach the head. Every operation costs O(1) amortised, whatever the number waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rpds import HashTrieMap, Queue

from cbjax.scheduler.groups import Window, first_column
from cbjax.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """KV of a waiting request that is kept in host memory.

    Attributes:
      num_cells: tokens whose KV it is, from the first on.
      index: i32[groups, columns], place of each table column's block in the copy; -1 where it had left its window.
    """

    num_cells: int
    index: np.ndarray

    @property
    def num_blocks(self) -> int:
        """Blocks of the copy."""
        return int((self.index >= 0).sum())

    def restored(self, found: int, windows: Sequence[Window], block_size: int) -> np.ndarray:
        """i32[groups, columns], the part of `index` that is wanted if the first `found` columns are held without it.

        -1 where the next token does not see the column.
        """
        index = self.index[:, found:].copy()
        for group, window in enumerate(windows):
            index[group, : max(0, first_column(self.num_cells, window, block_size) - found)] = -1
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request that holds no blocks on the device.

    Attributes:
      request: what was submitted.
      outputs: i32[outputs], tokens it had generated before it was evicted; never generated again.
      incarnation: how many times it was admitted before.
      evicted: it lost its blocks and has gained no token since.
      saved: its KV, if that was offloaded and not dropped.
    """

    request: Request
    outputs: np.ndarray
    incarnation: int = 0
    evicted: bool = False
    saved: Saved | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill: the prompt and what was generated before."""
        return len(self.request.prompt) + len(self.outputs)

    @property
    def known(self) -> np.ndarray:
        """i32[num_tokens], these tokens."""
        return np.concatenate([self.request.prompt, self.outputs]) if len(self.outputs) else self.request.prompt


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """See the module's docstring. Every method returns a new line and leaves this one as it was.

    Attributes:
      returning: uids of evicted requests, the next one first; at most as many as there are slots.
      fresh: `rpds.Queue` of uids (its stubs lack methods that it has).
      entries: uid -> `Waiting`.
    """

    returning: tuple[int, ...]
    fresh: Any
    entries: HashTrieMap[int, Waiting]

    @classmethod
    def empty(cls) -> WaitingLine:
        return cls((), Queue(), HashTrieMap())

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, uid: int) -> bool:
        return uid in self.entries

    def __iter__(self) -> Iterator[Waiting]:
        """All waiting requests in the order in which they will be offered a place. O(waiting)."""
        for uid in (*self.returning, *self.fresh):
            if uid in self.entries:
                yield self.entries[uid]

    def head(self) -> Waiting | None:
        """Who is next, if anybody waits."""
        if self.returning:
            return self.entries[self.returning[0]]
        if self.fresh:
            return self.entries[self.fresh.peek()]
        return None

    def push(self, waiting: Waiting) -> WaitingLine:
        """A fresh request goes to the end."""
        uid = waiting.request.uid
        return WaitingLine(self.returning, self.fresh.enqueue(uid), self.entries.insert(uid, waiting))

    def push_front(self, victims: Sequence[Waiting]) -> WaitingLine:
        """Evicted requests go before everybody, the first of `victims` at the very front."""
        entries = self.entries
        for waiting in victims:
            entries = entries.insert(waiting.request.uid, waiting)
        uids = tuple(waiting.request.uid for waiting in victims)
        return WaitingLine(uids + self.returning, self.fresh, entries)

    def remove(self, uid: int) -> WaitingLine:
        """Takes one out, wherever it stands."""
        entries = self.entries.remove(uid)
        returning, fresh = self.returning, self.fresh
        while returning and returning[0] not in entries:
            returning = returning[1:]
        while fresh and fresh.peek() not in entries:
            fresh = fresh.dequeue()
        return WaitingLine(returning, fresh, entries)

    def without_saved(self) -> WaitingLine:
        """The same line, with nobody's KV kept in host memory."""
        entries = self.entries
        for uid in self.returning:
            if uid in entries and entries[uid].saved is not None:
                entries = entries.insert(uid, replace(entries[uid], saved=None))
        return WaitingLine(self.returning, self.fresh, entries)
