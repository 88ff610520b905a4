"""A map from block ids to values, as a persistent value that is cheap to change in a few places at a time.

Two levels of lists: a draft copies the outer one when it is made and an inner one when it first writes to it, about a
microsecond each, where a hash trie takes three for every entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BITS = 7
_CHUNK = 1 << _BITS


class BlockMap[T]:
    """block -> value, or None. Its lists are never written: see `BlockMapDraft`."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: Sequence[Sequence[T | None]]) -> None:
        self.chunks = chunks

    @classmethod
    def empty(cls, num_blocks: int) -> BlockMap[T]:
        """None for each of `num_blocks`."""
        nothing: tuple[T | None, ...] = (None,) * _CHUNK
        return cls((nothing,) * -(-num_blocks // _CHUNK))

    def items(self) -> Iterator[tuple[int, T]]:
        """The blocks that have a value, in ascending order, and these."""
        for number, chunk in enumerate(self.chunks):
            for place, value in enumerate(chunk):
                if value is not None:
                    yield number << _BITS | place, value


class BlockMapDraft[T]:
    """A map that can be written."""

    __slots__ = ("_chunks", "_own")

    def __init__(self, blocks: BlockMap[T]) -> None:
        self._chunks = list(blocks.chunks)
        self._own: dict[int, list[T | None]] = {}

    def __getitem__(self, block: int) -> T | None:
        return self._chunks[block >> _BITS][block & _CHUNK - 1]

    def __setitem__(self, block: int, value: T | None) -> None:
        number = block >> _BITS
        chunk = self._own.get(number)
        if chunk is None:
            chunk = self._own[number] = self._chunks[number] = list(self._chunks[number])
        chunk[block & _CHUNK - 1] = value

    def freeze(self) -> BlockMap[T]:
        """The map this draft has come to. The draft can be written no more."""
        chunks, self._chunks = self._chunks, []
        return BlockMap(chunks)
