"""The block pool: who may have which block.

Invariant (conservation): every id in ``range(num_blocks)`` is blank, cached or live, and nothing else, always. Blank:
nobody holds it and what it holds is nothing. Cached: nobody holds it, and a prefix of tokens can be found in it. Live:
at least one request holds it; a block that several hold is full, registered and read-only. A multi-block allocation
that cannot be met changes nothing. The two reserved blocks of the store (``num_blocks`` and ``num_blocks + 1``) are not
ids of this pool, so no caller can be handed one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rpds import HashTrieMap

from cbjax.scheduler.eviction import ARC, EvictionPolicy
from cbjax.scheduler.eviction_ghosts import Ghosts
from cbjax.scheduler.eviction_order import FRESH, PROTECTED, EvictionOrder
from cbjax.scheduler.prefix import Prefix
from cbjax.scheduler.prefix_index import IndexDraft, PrefixIndex

# Room for the blocks of a few more requests that end in the same step.
_MORE_BLANK = 64


@dataclass(frozen=True, slots=True)
class BlockPool:
    """A value: nothing that it can see is ever written.

    Attributes:
      blank: i32[at least num_blank], of which the first `num_blank` are the blank ids, a stack.
      cached: the cached blocks, in order.
      holders: live block -> number of requests that hold it, where that is two or more.
      index: what registered blocks hold.
      policy: which cached block is taken when no blank one is left.
      ghosts: what was taken, if the policy adapts.
    """

    blank: np.ndarray
    num_blank: int
    cached: EvictionOrder
    holders: HashTrieMap[int, int]
    index: PrefixIndex
    policy: EvictionPolicy
    ghosts: Ghosts

    @classmethod
    def full(cls, num_blocks: int, *, num_groups: int = 1, policy: EvictionPolicy = ARC) -> BlockPool:
        """All of `num_blocks` ids blank; id 0 is handed out first."""
        blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        blank.setflags(write=False)
        index = PrefixIndex.empty(num_blocks, num_groups)
        cached, ghosts = EvictionOrder(num_blocks).freeze(), Ghosts.empty(num_blocks)
        return cls(blank, num_blocks, cached, HashTrieMap(), index, policy, ghosts)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that may serve a prompt again."""
        return self.cached.size

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: blank and cached ones."""
        return self.num_blank + self.cached.size

    def free_ids(self) -> np.ndarray:
        """i32[num_free], the ids that nobody holds."""
        return np.concatenate([self.blank[: self.num_blank], self.cached.blocks()])

    def take(self, count: int) -> tuple[BlockPool, np.ndarray] | None:
        """`PoolDraft.take` as a function: the new pool and the ids, or None."""
        draft = PoolDraft(self)
        ids = draft.take(count)
        return None if ids is None else (draft.freeze(), ids)

    def give_back(self, ids: np.ndarray) -> BlockPool:
        """`PoolDraft.drop` as a function."""
        draft = PoolDraft(self)
        draft.drop(ids)
        return draft.freeze()

    def without_cache(self) -> BlockPool:
        """The same holders, and nothing can be found any more: cached blocks are blank, live ones unregistered."""
        draft = PoolDraft(self)
        for block in self.cached.blocks()[::-1].tolist():
            draft.forget(block)
        return replace(draft.freeze(), index=PrefixIndex.empty(len(self.cached.marks), len(self.index.found)))


class PoolDraft:
    """A pool that can be written: what is written is copied first, the rest is shared with the pool.

    Attributes:
      index: what registered blocks hold.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blank, self._num_blank = pool.blank, pool.num_blank
        self._cached, self._holders, self._ghosts = pool.cached.writable(), pool.holders, pool.ghosts
        self._adapts = pool.policy.adapts
        self.index = IndexDraft(pool.index)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return self._num_blank + self._cached.size

    def take(self, count: int) -> np.ndarray | None:
        """Hands out `count` ids (i32[count], read-only), blank ones first; or None, and then nothing changes."""
        if count > self.num_free:
            return None
        left = max(0, self._num_blank - count)
        ids = self._blank[left : self._num_blank][::-1]
        self._num_blank = left
        if len(ids) < count:
            ids = np.concatenate([ids, self._evict(count - len(ids))])
        elif ids.flags.writeable:
            ids = ids.copy()
        ids.setflags(write=False)
        return ids

    def forget(self, block: int) -> None:
        """Makes a cached block blank."""
        self._cached.remove(block)
        self.index.remove(block)
        self._push(np.array([block], np.int32))

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds the block and something can be found in it."""
        return block in self._cached

    def pin(self, block: int, *, reused: bool = True) -> None:
        """One holder more of a full block, live or cached; `reused` if that promises that there will be others."""
        if block in self._cached:
            self._cached.remove(block)
        else:
            self._holders = self._holders.insert(block, self._holders.get(block, 1) + 1)
        if reused and self._adapts:
            self._cached.mark(block, PROTECTED)

    def drop(self, ids: np.ndarray) -> None:
        """One holder less of each of `ids`, which are in the order of their positions.

        What nobody holds any more is cached if it is registered, else blank; of the blank ones the last is handed out
        first.
        """
        if self.index.is_empty and not self._holders:
            self._push(ids)
            return
        blank, cached = [], []
        in_order = ids.tolist()
        for block in reversed(in_order) if self._pool.policy.leaf_first else in_order:
            holders = self._holders.get(block, 1)
            if holders > 1:
                left = self._holders
                self._holders = left.insert(block, holders - 1) if holders > 2 else left.remove(block)
            elif self.index.is_registered(block):
                cached.append(block)
            else:
                blank.append(block)
        if self._pool.policy.leaf_first:
            blank.reverse()
        if cached:
            self._cached.add(cached)
        self._push(np.array(blank, np.int32))

    def register(self, block: int, group: int, prefix: Prefix, *, was_known: bool = True) -> int:
        """Makes a full block that a request holds findable.

        Args:
          was_known: its tokens were known at admission, so others may have computed them before.

        Returns:
          The block that the request holds now: another one if that had the same content before, and then it holds
          `block` no more.
        """
        found = self.index.find(group, prefix)
        if found is None:
            self.index.insert(block, group, prefix)
            if self._adapts:
                again = was_known and prefix.key in self._ghosts and self._recall(group, prefix)
                self._cached.mark(block, PROTECTED if again else FRESH)
            return block
        if found != block:
            self.pin(found, reused=self._extends_protected(group, prefix))
            self.drop(np.array([block], np.int32))
        return found

    def freeze(self) -> BlockPool:
        """The pool this draft has come to."""
        self._blank.setflags(write=False)
        self._cached.freeze()
        self._ghosts.freeze()
        index, policy = self.index.freeze(), self._pool.policy
        return BlockPool(self._blank, self._num_blank, self._cached, self._holders, index, policy, self._ghosts)

    def _evict(self, count: int) -> np.ndarray:
        """Takes cached blocks, i32[count], in the policy's order."""
        policy = self._pool.policy
        cached = self._cached
        blocks = policy.take(cached, count, self._ghosts.room)
        keys = [self.index.remove(block) for block in blocks]
        if self._adapts:
            self._ghosts = self._ghosts.writable()
            self._ghosts.remember(keys, cached.are_reused(blocks))
        return np.array(blocks, np.int32)

    def _recall(self, group: int, prefix: Prefix) -> bool:
        """Whether a chain that is registered now and was taken lately is to be protected for that."""
        if not self._extends_protected(group, prefix):
            return False
        self._ghosts = self._ghosts.writable()
        self._ghosts.recall(prefix.key)
        return True

    def _extends_protected(self, group: int, prefix: Prefix) -> bool:
        """Whether the block before may not be taken before this one, if this one is protected."""
        before = prefix.parent
        assert before is not None
        if before.parent is None:
            return True
        block = self.index.find(group, before)
        return block is not None and bool(self._cached.marks[block] == PROTECTED)

    def _push(self, ids: np.ndarray) -> None:
        if len(ids):
            first, end = self._num_blank, self._num_blank + len(ids)
            if not self._blank.flags.writeable or end > len(self._blank):
                # Only what is blank is copied, which is little once the cache has filled the pool.
                blank = np.empty(end + _MORE_BLANK, np.int32)
                blank[:first] = self._blank[:first]
                self._blank = blank
            self._blank[first:end] = ids
            self._num_blank = end
