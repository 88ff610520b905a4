"""The arithmetic of blocks, in blocks and tokens."""

from __future__ import annotations

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
