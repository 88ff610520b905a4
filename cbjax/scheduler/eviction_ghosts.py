"""What was taken from the prefix cache lately, and what its coming back says about the segments' sizes.

This is ARC (Megiddo and Modha, FAST 2003, "ARC: a self-tuning, low overhead replacement cache") with its two ghost
lists as one table of fingerprints, in which newer ghosts overwrite older ones, as S3-FIFO's does (Yang et al., SOSP
2023, "FIFO queues are all you need for cache eviction").
"""

from __future__ import annotations

import numpy as np

_PRESENT = 2  # a fingerprint's lowest bits: this one, and whether the block had been used again


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
        """No ghosts; half of the room is the protected segment's."""
        ghosts = cls(np.zeros(1 << (num_blocks - 1).bit_length(), np.uint16), (0, 0), num_blocks // 2, num_blocks)
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
        place, fingerprint = self._find(key)
        return int(self.table[place]) | 1 == fingerprint | 1

    def remember(self, key: bytes, *, reused: bool) -> None:
        """Adds the ghost of a block that was taken, to a writable one."""
        place, fingerprint = self._find(key)
        self._forget(place)
        self.table[place] = fingerprint | reused
        self._count(1, reused)

    def recall(self, key: bytes) -> None:
        """Removes a ghost, which is in this writable one: its block was computed anew, so it was taken too early.

        Its segment gets more room at the other's expense, the more the fewer ghosts it has.
        """
        place, _ = self._find(key)
        reused = bool(self.table[place] & 1)
        step = max(1, self.counts[not reused] // max(1, self.counts[reused]))
        self.room = min(max(self.room + (step if reused else -step), 0), self.num_blocks)
        self._forget(place)
        self.table[place] = 0

    def _find(self, key: bytes) -> tuple[int, int]:
        """Where a key's ghost would be, and its fingerprint."""
        number = int.from_bytes(key[:8], "little")
        return number & len(self.table) - 1, (number >> 32 & 0x3FFF) << 2 | _PRESENT

    def _forget(self, place: int) -> None:
        if ghost := int(self.table[place]):
            self._count(-1, bool(ghost & 1))

    def _count(self, by: int, reused: bool) -> None:
        fresh, again = self.counts
        self.counts = (fresh, again + by) if reused else (fresh + by, again)
