"""Which block holds the KV of which chain of tokens, in every layer group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rpds import HashTrieMap

from cbjax.scheduler.prefix import Prefix


class Name(NamedTuple):
    """What a registered block holds: a chain, in one layer group."""

    group: int
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class PrefixIndex:
    """A persistent value.

    Attributes:
      is_registered: bool[num_blocks], read-only.
      found: per layer group, key of a chain -> the block registered for it last.
      names: block -> what it holds; outdated where the block is not registered (to remove a name costs as much as to
        replace it).
    """

    is_registered: np.ndarray
    found: tuple[HashTrieMap[bytes, int], ...]
    names: HashTrieMap[int, Name]

    @classmethod
    def empty(cls, num_blocks: int, num_groups: int) -> PrefixIndex:
        is_registered = np.zeros(num_blocks, bool)
        is_registered.setflags(write=False)
        return cls(is_registered, (HashTrieMap(),) * num_groups, HashTrieMap())

    def registered(self) -> dict[int, Name]:
        """Every registered block, live or cached, and what it holds."""
        return {block: self.names[block] for block in np.flatnonzero(self.is_registered).tolist()}


class IndexDraft:
    """An index that can be written."""

    def __init__(self, index: PrefixIndex) -> None:
        self.is_registered, self._found, self._names = index.is_registered, list(index.found), index.names
        self._owned = False  # whether `is_registered` can be written

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever registered."""
        return not self._names

    def name(self, block: int) -> Name:
        """What a registered block holds."""
        return self._names[block]

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The group's block with these tokens after those tokens, if there is one."""
        block = self._found[group].get(prefix.key)
        return None if block is None or not self._names[block].prefix.is_same(prefix) else block

    def insert(self, block: int, group: int, prefix: Prefix) -> None:
        """Registers a block that is not registered. Another one under the same key can no longer be found."""
        self._found[group] = self._found[group].insert(prefix.key, block)
        self._names = self._names.insert(block, Name(group, prefix))
        self._mark(block, registered=True)

    def remove(self, blocks: Sequence[int]) -> list[bytes]:
        """Forgets registered blocks; returns their keys."""
        names, found, keys = self._names, self._found, []
        for block in blocks:
            group, prefix = names[block]
            key = prefix.key
            if found[group].get(key) == block:
                found[group] = found[group].remove(key)
            keys.append(key)
        self._mark(blocks, registered=False)
        return keys

    def freeze(self) -> PrefixIndex:
        """The index this draft has come to."""
        self.is_registered.setflags(write=False)
        return PrefixIndex(self.is_registered, tuple(self._found), self._names)

    def _mark(self, blocks: int | Sequence[int], *, registered: bool) -> None:
        if not self._owned:
            self.is_registered, self._owned = self.is_registered.copy(), True
        self.is_registered[blocks] = registered
