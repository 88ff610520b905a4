"""Which block holds the KV of which chain of tokens, in every layer group. A persistent value."""

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
    """See the module's docstring.

    Attributes:
      found: per layer group, key of a chain -> the block registered for it last.
      names: block -> what it holds; every registered block, live or cached.
    """

    found: tuple[HashTrieMap[bytes, int], ...]
    names: HashTrieMap[int, Name]

    @classmethod
    def empty(cls, num_groups: int) -> PrefixIndex:
        return cls((HashTrieMap(),) * num_groups, HashTrieMap())

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The group's block with these tokens after those tokens, if there is one."""
        block = self.found[group].get(prefix.key)
        return None if block is None or not self.names[block].prefix.is_same(prefix) else block

    def insert(self, block: int, group: int, prefix: Prefix) -> PrefixIndex:
        """Registers a block that is not registered. Another one under the same key can no longer be found."""
        return PrefixIndex(
            self._with(group, self.found[group].insert(prefix.key, block)),
            self.names.insert(block, Name(group, prefix)),
        )

    def remove(self, block: int) -> PrefixIndex:
        """Forgets a registered block."""
        group, prefix = self.names[block]
        found = self.found
        if found[group].get(prefix.key) == block:
            found = self._with(group, found[group].remove(prefix.key))
        return PrefixIndex(found, self.names.remove(block))

    def _with(self, group: int, mapping: HashTrieMap[bytes, int]) -> tuple[HashTrieMap[bytes, int], ...]:
        return (*self.found[:group], mapping, *self.found[group + 1 :])
