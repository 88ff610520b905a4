"""What a block holds, as a value: the chain of token blocks from the start of a sequence up to and with it.

Two equal chains have the same keys and values in every layer, so one block can serve both. A chain is found by its
`key`, a hash over the parent's key and the block's tokens, and taken only if all its tokens are equal, whatever the
hash: a collision costs a hit, never an output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

# Of the parent's key and a block's content.
type BlockHash = Callable[[bytes], bytes]


def blake2b_128(content: bytes) -> bytes:
    """The default hash: 16 bytes, the same on every machine."""
    return hashlib.blake2b(content, digest_size=16).digest()


class Prefix:
    """A block of tokens after all those before it. Never changed once it is made.

    Attributes:
      parent: the block before; None for a root, which stands for no tokens at all.
      content: i32 tokens as bytes; a root's is its namespace.
      key: hash of the parent's key and `content`.
    """

    __slots__ = ("content", "key", "parent")

    def __init__(self, parent: Prefix | None, content: bytes, key: bytes) -> None:
        self.parent, self.content, self.key = parent, content, key

    def extend(self, tokens: np.ndarray, block_hash: BlockHash) -> Prefix:
        """This chain and one block more: `tokens` i32[block_size]."""
        content = tokens.tobytes()
        return Prefix(self, content, block_hash(self.key + content))

    def is_same(self, other: Prefix) -> bool:
        """Whether both chains hold equal tokens in one namespace. Chains that share a beginning compare up to there."""
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.key != theirs.key or mine.content != theirs.content:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def root(namespace: bytes, weights_version: int, block_hash: BlockHash) -> Prefix:
    """The start of every chain of a namespace (a salt, an adapter's name) under these weights."""
    content = weights_version.to_bytes(8, "little") + namespace
    return Prefix(None, content, block_hash(content))
