"""Cached blocks in the order in which they were last given up, and the policies that take from it.

A cached block holds the KV of a chain of tokens and no request holds it. It counts as free: when blocks are needed and
no blank one is left, the policy names cached ones, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Blocks that wait at most: looking for one among them is linear.
_MAX_LATE = 256


class EvictionOrder:
    """A doubly linked list over block ids: O(1) at both ends and in the middle, and a copy is one memcpy.

    The list is a ring through `num_blocks`, which is no block. Whoever holds a state's order must not write it: see
    `writable`. Blocks that are given up while nobody takes any, which is what most updates do, cost no copy: they wait
    in `late` until somebody does.

    Attributes:
      links: i32[2, num_blocks + 1], the block given up before and after each; -1 for a block that is not in the list.
      late: blocks given up after all of the list's, in order.
      size: blocks in the order.
    """

    __slots__ = ("late", "links", "size")

    def __init__(self, links: np.ndarray, late: tuple[int, ...], size: int) -> None:
        self.links, self.late, self.size = links, late, size

    @classmethod
    def empty(cls, num_blocks: int) -> EvictionOrder:
        links = np.full((2, num_blocks + 1), -1, np.int32)
        links[:, num_blocks] = num_blocks
        links.setflags(write=False)
        return cls(links, (), 0)

    @property
    def oldest(self) -> int:
        """The block given up first, of a writable order that has one."""
        return int(self.links[1, -1])

    @property
    def newest(self) -> int:
        """The block given up last, of a writable order that has one."""
        return int(self.links[0, -1])

    def __contains__(self, block: int) -> bool:
        return self.links[0, block] >= 0 or block in self.late

    def blocks(self) -> np.ndarray:
        """i32[size], in no particular order."""
        listed = np.flatnonzero(self.links[0, :-1] >= 0)
        return np.concatenate([listed, np.array(self.late, np.int64)]).astype(np.int32)

    def writable(self) -> EvictionOrder:
        """A copy to write, unless this is one already."""
        if self.links.flags.writeable:
            return self
        order = EvictionOrder(self.links.copy(), (), self.size - len(self.late))
        return order.extended(self.late) if self.late else order

    def extended(self, blocks: Sequence[int]) -> EvictionOrder:
        """The order with `blocks`, which are not in it, as its newest, the last of them the newest of all."""
        if not self.links.flags.writeable:
            late = (*self.late, *blocks)
            if len(late) <= _MAX_LATE:
                return EvictionOrder(self.links, late, self.size + len(blocks))
            return self.writable().extended(blocks)
        before, after = self.links
        end = len(before) - 1
        last = before[end]
        for block in blocks:
            before[block], after[last] = last, block
            last = block
        before[end], after[last] = last, end
        self.size += len(blocks)
        return self

    def remove(self, block: int) -> None:
        """Takes `block`, which is in it, out of a writable order."""
        before, after = self.links
        left, right = before[block], after[block]
        after[left], before[right] = right, left
        before[block] = after[block] = -1
        self.size -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """Which cached block goes next.

    Attributes:
      name: what a config says.
      victim: of an order that is not empty.
      leaf_first: a chain's blocks are given up last block first, so that the order ends with its beginning. Either way
        a chain must lose its end before its beginning: what follows a missing block can never be found.
    """

    name: str
    victim: Callable[[EvictionOrder], int]
    leaf_first: bool


def _oldest(order: EvictionOrder) -> int:
    return order.oldest


def _newest(order: EvictionOrder) -> int:
    return order.newest


LRU = EvictionPolicy(name="lru", victim=_oldest, leaf_first=True)
LIFO = EvictionPolicy(name="lifo", victim=_newest, leaf_first=False)
EVICTION_MAPPING: Mapping[str, EvictionPolicy] = {policy.name: policy for policy in (LRU, LIFO)}


def eviction_named(name: str) -> EvictionPolicy:
    """The policy of that name.

    Raises:
      ValueError: no such policy.
    """
    if not isinstance(name, str) or name not in EVICTION_MAPPING:
        raise ValueError(f"eviction_policy must be one of {sorted(EVICTION_MAPPING)}; got {name!r}")
    return EVICTION_MAPPING[name]
