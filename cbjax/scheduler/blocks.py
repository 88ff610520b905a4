"""The block pool: which ids are free, and the arithmetic of blocks.

Invariant (conservation): every id in ``range(num_blocks)`` is either free or held by exactly one table, always. A
multi-block allocation that cannot be met changes nothing. The two reserved blocks of the store (``num_blocks`` and
``num_blocks + 1``) are not ids of this pool, so no caller can be handed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_BLOCK_SIZE = 4
NUM_RESERVED_BLOCKS = 2


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens; the last one may be partly filled."""
    return -(-num_tokens // block_size)


def internal_waste(num_tokens: int, block_size: int) -> int:
    """Token slots paid for and unused in the last block, in ``[0, block_size)``."""
    return blocks_for(num_tokens, block_size) * block_size - num_tokens


def padding_waste(num_tokens: list[int]) -> int:
    """Token slots a rectangular batch of these row lengths would waste, and a ragged one does not.

    Raises:
      ValueError: a row without tokens; it has no place in any batch.
    """
    if min(num_tokens, default=0) < 1:
        raise ValueError(f"every row of a batch has at least one token; got lengths {num_tokens}")
    return len(num_tokens) * max(num_tokens) - sum(num_tokens)


def may_admit(*, free: int, need: int, num_blocks: int, safety_margin: float) -> bool:
    """The admission rule: `need` blocks are there, and the pool is not below its reserve.

    `free` counts what could be handed out now (this step's own allocations already subtracted). The reserve gates
    waiting requests only; active ones ignore it.
    """
    # The product can lie a hair above the whole number it stands for (0.07 * 100 > 7).
    return free >= need and free + 1e-9 >= safety_margin * num_blocks


@dataclass(frozen=True, slots=True)
class BlockPool:
    """A persistent stack of free block ids.

    `free[:num_free]` are the free ids. The array is never written after it was made: taking blocks only moves
    `num_free`, giving blocks back makes a new array. Old pools therefore stay valid.
    """

    free: np.ndarray  # i32[num_blocks]
    num_free: int

    @classmethod
    def full(cls, num_blocks: int) -> BlockPool:
        """All of `num_blocks` ids free; id 0 is handed out first."""
        free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        free.setflags(write=False)
        return cls(free, num_blocks)

    def take(self, count: int) -> tuple[BlockPool, np.ndarray] | None:
        """Hands out `count` ids (i32[count], read-only), or None, and then nothing changes."""
        if count > self.num_free:
            return None
        left = self.num_free - count
        return BlockPool(self.free, left), self.free[left : self.num_free][::-1]

    def give_back(self, ids: np.ndarray) -> BlockPool:
        """Takes `ids` back; the one given back last is handed out first."""
        free = np.empty_like(self.free)
        free[: self.num_free] = self.free[: self.num_free]
        end = self.num_free + len(ids)
        free[self.num_free : end] = ids
        free.setflags(write=False)
        return BlockPool(free, end)
