"""Copies of KV blocks in host memory, by request.

What is handed in comes from a gather and is a buffer of its own, never the store's: steps that donate the store cannot
reach a copy, even where the host's memory is the device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from cbjax.cache.block_copies import CALLS_IN_FLIGHT, Block


class HostTier:
    """Keeps at most one copy per request, until it is taken back, discarded or all are cleared.

    Attributes:
      memory_kind: the device's kind of host memory that copies lie in: then a copy is dispatched and only a long one
        is waited for. None: they are NumPy arrays, and each call waits until its blocks have arrived.
    """

    def __init__(self, memory_kind: str | None) -> None:
        """memory_kind: "pinned_host" or "unpinned_host", as `MachineFacts.host_memory` has it."""
        self.memory_kind = memory_kind
        self._copies: dict[int, list[Block]] = {}
        self._homes: tuple[jax.sharding.Sharding, ...] = ()

    def keep(self, uid: int, calls: Iterable[Sequence[tuple[jax.Array, ...]]]) -> None:
        """Copies a request's blocks; each is on the device twice until its copy has arrived.

        So after every `CALLS_IN_FLIGHT` calls it waits for these.

        Args:
          uid: of a request that has no copy.
          calls: blocks as gathers hand them out.
        """
        assert uid not in self._copies, f"uid {uid} has a copy already"
        # Registered when it is whole, so that an interrupt leaves no half copy.
        copy: list[Block] = []
        for number, blocks in enumerate(calls, start=1):
            copy += self._to_host(blocks)
            if number % CALLS_IN_FLIGHT == 0:
                jax.block_until_ready(copy[-len(blocks) :])
        self._copies[uid] = copy

    def fetch(self, uid: int, index: np.ndarray) -> list[Block]:
        """Blocks of a request's copy, on their way to the device.

        Args:
          uid: of a request that has a copy; it stays.
          index: i32[blocks], which blocks, as they were handed in.
        """
        assert uid in self._copies, f"uid {uid} has no copy"
        blocks = [self._copies[uid][i] for i in index.tolist()]
        return blocks if self.memory_kind is None else jax.device_put(blocks, [self._homes] * len(blocks))

    def discard(self, uid: int) -> None:
        """Drops a request's copy; nothing if it has none."""
        self._copies.pop(uid, None)

    def clear(self) -> None:
        """Drops every copy."""
        self._copies.clear()

    def __contains__(self, uid: int) -> bool:
        return uid in self._copies

    @property
    def num_blocks(self) -> int:
        """Blocks kept."""
        return sum(map(len, self._copies.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks kept."""
        return sum(array.nbytes for array in jax.tree.leaves(self._copies))

    def _to_host(self, blocks: Sequence[tuple[jax.Array, ...]]) -> Sequence[Block]:
        if self.memory_kind is None:
            return jax.device_get(blocks)
        self._homes = tuple(array.sharding for array in blocks[0])
        host = tuple(home.with_memory_kind(self.memory_kind) for home in self._homes)
        return jax.device_put(blocks, [host] * len(blocks))
