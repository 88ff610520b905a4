"""Which block holds the KV of which chain of tokens, in every layer group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rpds import HashTrieMap

from cbjax.scheduler.block_map import BlockMap, BlockMapDraft
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
      names: what each registered block holds.
      num_registered: blocks that have a name.
    """

    found: tuple[HashTrieMap[bytes, int], ...]
    names: BlockMap[Name]
    num_registered: int

    @classmethod
    def empty(cls, num_blocks: int, num_groups: int) -> PrefixIndex:
        return cls((HashTrieMap(),) * num_groups, BlockMap.empty(num_blocks), 0)

    def registered(self) -> dict[int, Name]:
        """Every registered block, live or cached, and what it holds."""
        return dict(self.names.items())


class IndexDraft:
    """An index that can be written."""

    def __init__(self, index: PrefixIndex) -> None:
        self._found, self._names, self._num_registered = (
            list(index.found),
            BlockMapDraft(index.names),
            index.num_registered,
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered."""
        return not self._num_registered

    def is_registered(self, block: int) -> bool:
        """Whether the block has a name."""
        return self._names[block] is not None

    def name(self, block: int) -> Name:
        """What a registered block holds."""
        name = self._names[block]
        assert name is not None
        return name

    def find(self, group: int, prefix: Prefix) -> int | None:
        """The group's block with these tokens after those tokens, if there is one."""
        block = self._found[group].get(prefix.key)
        return None if block is None or not self.name(block).prefix.is_same(prefix) else block

    def insert(self, block: int, group: int, prefix: Prefix) -> None:
        """Registers a block that is not registered. Another one under the same key can no longer be found."""
        self._found[group] = self._found[group].insert(prefix.key, block)
        self._names[block] = Name(group, prefix)
        self._num_registered += 1

    def remove(self, block: int) -> bytes:
        """Forgets a registered block; returns its key."""
        group, prefix = self.name(block)
        found = self._found[group]
        if found.get(prefix.key) == block:
            self._found[group] = found.remove(prefix.key)
        self._names[block] = None
        self._num_registered -= 1
        return prefix.key

    def freeze(self) -> PrefixIndex:
        """The index this draft has come to."""
        return PrefixIndex(tuple(self._found), self._names.freeze(), self._num_registered)
