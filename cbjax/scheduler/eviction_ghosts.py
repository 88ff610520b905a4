"""What was taken from the prefix cache lately, and what its coming back says about the segments' sizes.

This is ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache") with its two ghost
lists as one table of fingerprints, in which newer ghosts overwrite older ones, as S3-FIFO's does (Yang et al., SOSP
2023, "FIFO queues are all you need for cache eviction").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A ghost's bits from the lowest: was the block used again; 1, so that it is not 0; its key's fingerprint.
_PRESENT, _FINGERPRINT = 2, (1 << 14) - 1


class Ghosts:
    """A persistent value, unless `writable` made it. It knows keys by 14 bits, so it errs once in 16,384 times; that
    can cost a hit and nothing else.

    Attributes:
      table: u16[power of two, at least num_blocks], by the lowest bits of a key.
      counts: ghosts of blocks that were not used again, and of those that were.
      room: blocks that the protected segment may have.
      num_blocks: of the pool.
    """

    __slots__ = ("counts", "num_blocks", "room", "table")

    def __init__(self, table: np.ndarray, counts: tuple[int, int], room: int, num_blocks: int) -> None:
        self.table, self.counts, self.room, self.num_blocks = table, counts, room, num_blocks

    @classmethod
    def empty(cls, num_blocks: int) -> Ghosts:
        """No ghosts, and no room for protected blocks until experience shows that they deserve some."""
        ghosts = cls(np.zeros(1 << (num_blocks - 1).bit_length(), np.uint16), (0, 0), 0, num_blocks)
        ghosts.freeze()
        return ghosts

    def freeze(self) -> None:
        """Nothing of this is written from now on."""
        self.table.setflags(write=False)

    def writable(self) -> Ghosts:
        """A copy to write, unless this is one already."""
        if self.table.flags.writeable:
            return self
        return Ghosts(self.table.copy(), self.counts, self.room, self.num_blocks)

    def __contains__(self, key: bytes) -> bool:
        number = int.from_bytes(key, "little")
        ghost = self.table.item(number & len(self.table) - 1)
        return ghost > 0 and ghost >> 2 == number >> 32 & _FINGERPRINT

    def remember(self, keys: Sequence[bytes], reused: Sequence[bool]) -> None:
        """Adds the ghosts of blocks that were taken, and whether they had been used again, to a writable one."""
        table, counts = memoryview(self.table), [*self.counts]
        last = len(table) - 1
        for key, again in zip(keys, reused, strict=True):
            number = int.from_bytes(key, "little")
            place = number & last
            if ghost := table[place]:
                counts[ghost & 1] -= 1
            table[place] = (number >> 32 & _FINGERPRINT) << 2 | _PRESENT | again
            counts[again] += 1
        self.counts = counts[0], counts[1]

    def recall(self, key: bytes) -> None:
        """Removes a ghost, which is in this writable one: its block was computed anew, so it was taken too early.

        Its segment gets more room at the other's expense, the more the fewer ghosts it has.
        """
        place = int.from_bytes(key, "little") & len(self.table) - 1
        reused = bool(self.table[place] & 1)
        fresh, again = self.counts
        if reused:
            self.room = min(self.room + max(1, fresh // again), self.num_blocks)
            self.counts = fresh, again - 1
        else:
            self.room = max(self.room - max(1, again // fresh), 0)
            self.counts = fresh - 1, again
        self.table[place] = 0
