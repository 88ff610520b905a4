"""Cached blocks in the order in which they were last given up, in two segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# What an order knows of a block: not used again since it was made, used again, used again but long ago.
FRESH, PROTECTED, DEMOTED = 0, 1, 2
# Blocks that wait at most: looking for one among them is linear.
_MAX_LATE = 256


class EvictionOrder:
    """Two doubly linked lists over block ids: O(1) at both ends and in the middle, and a copy is a memcpy.

    A block marked `PROTECTED` is in the protected list, any other in the probationary one; who marks none has one list.
    Each is a ring through an id that is no block, `num_blocks` or the one after. Whoever wants to write a state's order
    takes a copy of it (`writable`), which copies an array when it is first written. Blocks that are given up while
    nobody takes any, which is what most updates do, cost no copy: they wait in `late`.

    Attributes:
      before, after: i32[num_blocks + 2], the block given up before and after each. `after` is -1 for a block that is in
        no list; `before` says nothing about such a one, nor about the first of a list.
      marks: u8[num_blocks], of registered blocks, live or cached.
      late: blocks given up after all of the lists', in order; none once `before` is a private copy.
      size: blocks in the order.
      num_protected: of these, those in the protected list; late ones do not count yet.
      is_frozen: it belongs to a state.
    """

    __slots__ = ("after", "before", "is_frozen", "late", "marks", "num_protected", "size")

    def __init__(self, num_blocks: int) -> None:
        """An empty order."""
        self.before = np.full(num_blocks + 2, -1, np.int32)
        self.before[num_blocks:] = num_blocks, num_blocks + 1
        self.after = self.before.copy()
        self.marks = np.zeros(num_blocks, np.uint8)
        self.late: tuple[int, ...] = ()
        self.size = self.num_protected = 0
        self.is_frozen = False

    def __contains__(self, block: int) -> bool:
        return self.after[block] >= 0 or block in self.late

    def blocks(self) -> np.ndarray:
        """i32[size], in no particular order."""
        listed = np.flatnonzero(self.after[:-2] >= 0)
        return np.concatenate([listed, np.array(self.late, np.int64)]).astype(np.int32)

    def freeze(self) -> EvictionOrder:
        """This order, of which nothing is written from now on."""
        for array in (self.before, self.after, self.marks):
            array.setflags(write=False)
        self.is_frozen = True
        return self

    def writable(self) -> EvictionOrder:
        """A copy to write, unless this is one already."""
        if not self.is_frozen:
            return self
        order = EvictionOrder.__new__(EvictionOrder)
        order.before, order.after, order.marks, order.late = self.before, self.after, self.marks, self.late
        order.size, order.num_protected, order.is_frozen = self.size, self.num_protected, False
        return order

    def mark(self, block: int, mark: int) -> None:
        """Marks a block that is not in the order."""
        if self.marks[block] != mark:
            self._own_marks()
            self.marks[block] = mark

    def are_reused(self, blocks: Sequence[int]) -> list[bool]:
        """Whether each of `blocks` was used again since it was made."""
        marks = memoryview(self.marks)
        return [marks[block] != FRESH for block in blocks]

    def add(self, blocks: Sequence[int]) -> None:
        """Adds blocks as the newest, the last of them the newest of all."""
        self.size += len(blocks)
        if self.before.flags.writeable:
            self._append(blocks)
            return
        self.late = (*self.late, *blocks)
        if len(self.late) > _MAX_LATE:
            self._list_late()

    def remove(self, block: int) -> None:
        """Takes out a block that is in the order."""
        self._list_late()
        before, after = self.before, self.after
        is_protected = bool(self.marks[block] == PROTECTED)
        end = len(self.marks) + is_protected
        left, right = end if after[end] == block else before[block], after[block]
        after[left], before[right] = right, left
        after[block] = -1
        self.size -= 1
        self.num_protected -= is_protected

    def take_oldest(self, count: int) -> list[int]:
        """Takes out the first `count` blocks, those on probation before protected ones."""
        if self.size - len(self.late) - self.num_protected <= count:
            self._list_late()
        blocks = self._unlink(len(self.marks), count)
        return blocks if len(blocks) == count else blocks + self._unlink_protected(count - len(blocks))

    def take_newest(self, count: int) -> list[int]:
        """Takes out the last `count` blocks, the last one first, of an order in which none is protected."""
        self._list_late()
        end, blocks = len(self.marks), []
        for _ in range(count):
            blocks.append(int(self.before[end]))
            self.remove(blocks[-1])
        return blocks

    def demote(self, count: int) -> None:
        """Makes the first `count` protected blocks the newest of those on probation."""
        self._list_late()
        blocks = self._unlink_protected(count)
        self._own_marks()
        self.marks[blocks] = DEMOTED
        self.add(blocks)

    def _append(self, blocks: Sequence[int]) -> None:
        # Reading one number takes a third of the time that it takes through an array.
        before, after, marks = memoryview(self.before), memoryview(self.after), memoryview(self.marks)
        probation = len(marks)
        for block in blocks:
            end = probation
            if marks[block] == PROTECTED:
                end += 1
                self.num_protected += 1
            last = before[end]
            before[block], after[block] = last, end
            before[end] = after[last] = block

    def _list_late(self) -> None:
        """Makes the lists whole and writable."""
        if not self.before.flags.writeable:
            self.before = self.before.copy()
            self._own_after()
            late, self.late = self.late, ()
            self._append(late)

    def _unlink_protected(self, count: int) -> list[int]:
        blocks = self._unlink(len(self.marks) + 1, count)
        self.num_protected -= len(blocks)
        return blocks

    def _unlink(self, end: int, count: int) -> list[int]:
        """Takes up to `count` of the first blocks of the ring through `end`."""
        self._own_after()
        after = memoryview(self.after)
        blocks, block = [], after[end]
        while block != end and len(blocks) < count:
            blocks.append(block)
            following = after[block]
            after[block] = -1
            block = following
        after[end] = block
        if block == end and blocks:
            self.before[end] = end  # whoever empties a list has made it whole before
        self.size -= len(blocks)
        return blocks

    def _own_after(self) -> None:
        if not self.after.flags.writeable:
            self.after = self.after.copy()

    def _own_marks(self) -> None:
        if not self.marks.flags.writeable:
            self.marks = self.marks.copy()
