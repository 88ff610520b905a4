"""Cached blocks in the order in which they were last given up, and the policies that take from it.

A cached block holds the KV of a chain of tokens and no request holds it. It counts as free: when blocks are needed and
no blank one is left, the policy names cached ones, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


class EvictionOrder:
    """A doubly linked list over block ids: O(1) at both ends and in the middle, and a copy is one memcpy.

    The list is a ring through `num_blocks`, which is no block. Whoever holds a state's order must not write it: see
    `writable`.

    Attributes:
      links: i32[2, num_blocks + 1], the block given up before and after each; -1 for a block that is not in the order.
      size: blocks in the order.
    """

    __slots__ = ("links", "size")

    def __init__(self, links: np.ndarray, size: int) -> None:
        self.links, self.size = links, size

    @classmethod
    def empty(cls, num_blocks: int) -> EvictionOrder:
        links = np.full((2, num_blocks + 1), -1, np.int32)
        links[:, num_blocks] = num_blocks
        links.setflags(write=False)
        return cls(links, 0)

    @property
    def oldest(self) -> int:
        """The block given up first; only if there is one."""
        return int(self.links[1, -1])

    @property
    def newest(self) -> int:
        """The block given up last; only if there is one."""
        return int(self.links[0, -1])

    def __contains__(self, block: int) -> bool:
        return self.links[0, block] >= 0

    def blocks(self) -> np.ndarray:
        """i32[size], ascending."""
        return np.flatnonzero(self.links[0, :-1] >= 0).astype(np.int32)

    def writable(self) -> EvictionOrder:
        """A copy to write, unless this is one already."""
        return self if self.links.flags.writeable else EvictionOrder(self.links.copy(), self.size)

    def append(self, block: int) -> None:
        """Makes `block`, which is not in the order, the newest."""
        before, after = self.links
        end = len(before) - 1
        last = before[end]
        before[block], after[block] = last, end
        after[last] = before[end] = block
        self.size += 1

    def remove(self, block: int) -> None:
        """Takes out `block`, which is in the order."""
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
