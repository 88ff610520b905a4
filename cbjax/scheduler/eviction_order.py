"""Cached blocks in the order in which they were last given up, in two segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# What an order knows of a block: not used again since it was made, used again, used again but long ago.
FRESH, PROTECTED, DEMOTED = 0, 1, 2
# Blocks that wait at most: looking for one among them is linear.
_MAX_LATE = 256


class EvictionOrder:
    """Two doubly linked lists over block ids: O(1) at both ends and in the middle, and a copy is one memcpy.

    A block marked `PROTECTED` is in the protected segment, any other in the probationary one; who marks none has one
    list. Each is a ring through an id that is no block, `num_blocks` or the one after. Whoever holds a state's order
    must not write it: see `writable`. Blocks that are given up while nobody takes any, which is what most updates do,
    cost no copy: they wait in `late` until somebody does.

    Attributes:
      links: i32[2, num_blocks + 2], the block given up before and after each; -1 for a block that is in no list.
      marks: u8[num_blocks], of registered blocks, live or cached.
      late: blocks given up after all of the lists', in order.
      size: blocks in the order.
      num_protected: of these, those in the protected segment; late ones do not count yet.
    """

    __slots__ = ("late", "links", "marks", "num_protected", "size")

    def __init__(
        self, links: np.ndarray, marks: np.ndarray, late: tuple[int, ...], size: int, num_protected: int
    ) -> None:
        self.links, self.marks, self.late, self.size, self.num_protected = links, marks, late, size, num_protected

    @classmethod
    def empty(cls, num_blocks: int) -> EvictionOrder:
        links = np.full((2, num_blocks + 2), -1, np.int32)
        links[:, num_blocks:] = num_blocks, num_blocks + 1
        marks = np.zeros(num_blocks, np.uint8)
        order = cls(links, marks, (), 0, 0)
        order.freeze()
        return order

    def __contains__(self, block: int) -> bool:
        return self.links[0, block] >= 0 or block in self.late

    def blocks(self) -> np.ndarray:
        """i32[size], in no particular order."""
        listed = np.flatnonzero(self.links[0, :-2] >= 0)
        return np.concatenate([listed, np.array(self.late, np.int64)]).astype(np.int32)

    def freeze(self) -> None:
        """Nothing of this order is written from now on."""
        self.links.setflags(write=False)
        self.marks.setflags(write=False)

    def writable(self) -> EvictionOrder:
        """A copy whose lists can be written, unless this is one already."""
        if self.links.flags.writeable:
            return self
        order = EvictionOrder(self.links.copy(), self.marks, (), self.size - len(self.late), self.num_protected)
        return order.extended(self.late) if self.late else order

    def extended(self, blocks: Sequence[int]) -> EvictionOrder:
        """The order with `blocks`, which are not in it, as its newest, the last of them the newest of all."""
        if not self.links.flags.writeable:
            late = (*self.late, *blocks)
            if len(late) <= _MAX_LATE:
                return EvictionOrder(self.links, self.marks, late, self.size + len(blocks), self.num_protected)
            return self.writable().extended(blocks)
        # Reading one number takes a third of the time that it takes through an array.
        before, after, marks = memoryview(self.links[0]), memoryview(self.links[1]), memoryview(self.marks)
        probation = len(marks)
        for block in blocks:
            end = probation
            if marks[block] == PROTECTED:
                end += 1
                self.num_protected += 1
            last = before[end]
            before[block], after[block] = last, end
            before[end] = after[last] = block
        self.size += len(blocks)
        return self

    def marked(self, block: int, mark: int) -> EvictionOrder:
        """The order with another mark of `block`, which is in no list."""
        if self.marks[block] == mark:
            return self
        order = self
        if not self.marks.flags.writeable:
            order = EvictionOrder(self.links, self.marks.copy(), self.late, self.size, self.num_protected)
        order.marks[block] = mark
        return order

    def remove(self, block: int) -> None:
        """Takes `block`, which is in it, out of a writable order."""
        before, after = self.links
        left, right = before[block], after[block]
        after[left], before[right] = right, left
        before[block] = after[block] = -1
        self.size -= 1
        self.num_protected -= bool(self.marks[block] == PROTECTED)

    def are_reused(self, blocks: Sequence[int]) -> list[bool]:
        """Whether each of `blocks` was used again since it was made."""
        marks = memoryview(self.marks)
        return [marks[block] != FRESH for block in blocks]

    def take_oldest(self, count: int) -> list[int]:
        """Takes the first `count` blocks out of a writable order, those on probation before protected ones."""
        blocks = self._unlink(len(self.marks), count, oldest=True)
        return blocks if len(blocks) == count else blocks + self._unlink_protected(count - len(blocks))

    def take_newest(self, count: int) -> list[int]:
        """Takes the last `count` blocks, the last one first, out of a writable order in which none is protected."""
        return self._unlink(len(self.marks), count, oldest=False)

    def demote(self, count: int) -> None:
        """Makes the first `count` protected blocks of a writable order the newest of those on probation."""
        blocks = self._unlink_protected(count)
        if not self.marks.flags.writeable:
            self.marks = self.marks.copy()
        self.marks[blocks] = DEMOTED
        self.extended(blocks)

    def _unlink_protected(self, count: int) -> list[int]:
        blocks = self._unlink(len(self.marks) + 1, count, oldest=True)
        self.num_protected -= len(blocks)
        return blocks

    def _unlink(self, end: int, count: int, *, oldest: bool) -> list[int]:
        """Takes up to `count` blocks from one end of the ring through `end`."""
        before, after = memoryview(self.links[0]), memoryview(self.links[1])
        back, ahead = (before, after) if oldest else (after, before)
        blocks, block = [], ahead[end]
        while block != end and len(blocks) < count:
            blocks.append(block)
            following = ahead[block]
            ahead[block] = back[block] = -1
            block = following
        ahead[end], back[block] = block, end
        self.size -= len(blocks)
        return blocks
