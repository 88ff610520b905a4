"""Policies: which cached blocks are taken when blocks are needed and no blank one is left.

A cached block holds the KV of a chain of tokens and no request holds it; it counts as free. What follows a missing
block can never be found, so a chain should lose its end before its beginning. `lru` and `arc` see to it: the blocks of
a request are given up last one first, and who uses a block uses all before it, so that a block is never older than one
after it, nor on probation while one after it is protected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cbjax.scheduler.eviction_order import EvictionOrder

# Protected blocks that go on probation for each block taken, at most: a step's time must not depend on their number.
_DEMOTED_PER_BLOCK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """Which cached blocks go next.

    Attributes:
      name: what a config says.
      take: takes a number of blocks, at most as many as there are, out of a writable order; `room` is what the
        protected segment may have.
      leaf_first: a chain's blocks are given up last block first, so that the order ends with its beginning.
      adapts: blocks that are used again are protected, and what was taken is remembered (`Ghosts`) to adapt the room.
    """

    name: str
    take: Callable[[EvictionOrder, int, int], list[int]]
    leaf_first: bool = True
    adapts: bool = False


def _least_recently_used(order: EvictionOrder, count: int, room: int) -> list[int]:
    """What was not used for longest; with `leaf_first` it is the policy of vLLM's and SGLang's prefix caches."""
    return order.take_oldest(count)


def _last_in_first_out(order: EvictionOrder, count: int, room: int) -> list[int]:
    """What was given up last, as transformers' continuous batching does."""
    return order.take_newest(count)


def _adaptive(order: EvictionOrder, count: int, room: int) -> list[int]:
    """What was used only once before what was used again, within what experience shows to be each one's share.

    ARC (see `Ghosts`), but what is protected beyond its room is not taken at once: it goes on probation, as in SLRU
    (Karedla et al., Computer 1994, "Caching strategies to improve disk system performance"), so that the blocks after
    it, which may be there, are taken before it.
    """
    beyond = order.num_protected - room
    if beyond > 0:
        order.demote(min(beyond, _DEMOTED_PER_BLOCK * count))
    return order.take_oldest(count)


LRU = EvictionPolicy(name="lru", take=_least_recently_used)
LIFO = EvictionPolicy(name="lifo", take=_last_in_first_out, leaf_first=False)
ARC = EvictionPolicy(name="arc", take=_adaptive, adapts=True)
EVICTION_MAPPING: Mapping[str, EvictionPolicy] = {policy.name: policy for policy in (ARC, LRU, LIFO)}


def eviction_named(name: str) -> EvictionPolicy:
    """The policy of that name.

    Raises:
      ValueError: no such policy.
    """
    if not isinstance(name, str) or name not in EVICTION_MAPPING:
        raise ValueError(f"eviction_policy must be one of {sorted(EVICTION_MAPPING)}; got {name!r}")
    return EVICTION_MAPPING[name]
