"""A prefix cache alone, for policies that the scheduler does not have: bounds, and what else was tried.

Requests come one at a time and nothing else holds blocks, so the cache has the whole pool. Only a block that no cached
one follows is taken: the one with the smallest priority, which is a function of what is known about it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cbjax.scheduler.prefix import blake2b_128, root
from cbjax.simulate import Trace

# A prompt's full blocks as numbers: equal ones hold equal tokens after equal tokens.
type Chain = Sequence[int]


class Use(NamedTuple):
    """What a policy may look at; times are numbers of requests.

    Attributes:
      last: the last request that used the block.
      made: the one that computed it.
      count: uses since then, that one included.
      next: the next request that will use it; infinite if there is none.
    """

    last: int
    made: int
    count: int
    next: float


type Priority = Callable[[Use], float]

PRIORITIES: Mapping[str, Priority] = {
    "clairvoyant": lambda use: -use.next,
    "lru": lambda use: use.last,
    "fifo": lambda use: use.made,
    "lfu": lambda use: use.count,
}


def chains(trace: Trace, block_size: int) -> list[Chain]:
    """The blocks of every prompt that can be found: its last token is always computed."""
    numbers: dict[bytes, int] = {}
    start = root(b"", 0, blake2b_128)
    made = []
    for index in range(len(trace)):
        prompt, prefix, chain = trace.prompt(index), start, []
        for first in range(0, (len(prompt) - 1) // block_size * block_size, block_size):
            prefix = prefix.extend(prompt[first : first + block_size], blake2b_128)
            chain.append(numbers.setdefault(prefix.key, len(numbers)))
        made.append(chain)
    return made


class Cache:
    """Blocks and what is known about them.

    Attributes:
      uses: of each cached block.
    """

    def __init__(self, capacity: int, priority: Priority) -> None:
        self.uses: dict[int, Use] = {}
        self._capacity, self._priority = capacity, priority
        self._before: dict[int, int] = {}
        self._followers: Counter[int] = Counter()
        self._leaves: list[tuple[float, int]] = []  # priority and block; outdated ones are passed over

    def serve(self, now: int, chain: Chain, following: Sequence[float]) -> int:
        """Finds what is cached of a chain and computes the rest, as far as there is room; returns the blocks found.

        Args:
          following: for each of its blocks, the next request that will use it.
        """
        found = next((i for i, block in enumerate(chain) if block not in self.uses), len(chain))
        for block, later in zip(chain[:found], following, strict=False):
            _, made, count, _ = self.uses[block]
            self.uses[block] = Use(now, made, count + 1, later)
        kept = found
        for block, later in zip(chain[found:], following[found:], strict=True):
            if len(self.uses) == self._capacity and not self._take(now):
                break
            self.uses[block] = Use(now, now, 1, later)
            if kept:
                self._before[block] = chain[kept - 1]
                self._followers[chain[kept - 1]] += 1
            kept += 1
        if kept:
            self._offer(chain[kept - 1])
        return found

    def _offer(self, block: int) -> None:
        heapq.heappush(self._leaves, (self._priority(self.uses[block]), block))

    def _take(self, now: int) -> bool:
        """Takes a block that the current request does not use, if there is one."""
        while self._leaves:
            value, block = heapq.heappop(self._leaves)
            use = self.uses.get(block)
            if use is None or use.last == now or self._followers[block] or value != self._priority(use):
                continue
            del self.uses[block]
            before = self._before.pop(block, None)
            if before is not None:
                self._followers[before] -= 1
                if not self._followers[before]:
                    self._offer(before)
            return True
        return False


def hits(requests: Sequence[Chain], capacity: int, priority: Priority) -> int:
    """Blocks found by all requests in a cache of `capacity` blocks."""
    coming: defaultdict[int, list[int]] = defaultdict(list)
    for now in reversed(range(len(requests))):
        for block in requests[now]:
            coming[block].append(now)
    cache, found = Cache(capacity, priority), 0
    for now, chain in enumerate(requests):
        for block in chain:
            coming[block].pop()
        following = [coming[block][-1] if coming[block] else math.inf for block in chain]
        found += cache.serve(now, chain, following)
    return found
