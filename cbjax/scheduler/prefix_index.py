"""Which block holds the KV of which chain of tokens, in every layer group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
      found: per layer group, key of a chain -> the block registered for it last.
      names: block -> what it holds; every registered block, live or cached.
    """

    found: tuple[HashTrieMap[bytes, int], ...]
    names: HashTrieMap[int, Name]

    @classmethod
    def empty(cls, num_groups: int) -> PrefixIndex:
        return cls((HashTrieMap(),) * num_groups, HashTrieMap())


class IndexDraft:
    """An index that can be written."""

    def __init__(self, index: PrefixIndex) -> None:
        self._found, self.names = list(index.found), index.names

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The group's block with these tokens after those tokens, if there is one."""
        block = self._found[group].get(prefix.key)
        return None if block is None or not self.names[block].prefix.is_same(prefix) else block

    def insert(self, block: int, group: int, prefix: Prefix) -> None:
        """Registers a block that is not registered. Another one under the same key can no longer be found."""
        self._found[group] = self._found[group].insert(prefix.key, block)
        self.names = self.names.insert(block, Name(group, prefix))

    def remove(self, block: int) -> None:
        """Forgets a registered block."""
        group, prefix = self.names[block]
        if self._found[group].get(prefix.key) == block:
            self._found[group] = self._found[group].remove(prefix.key)
        self.names = self.names.remove(block)

    def freeze(self) -> PrefixIndex:
        """The index this draft has come to."""
        return PrefixIndex(tuple(self._found), self.names)
