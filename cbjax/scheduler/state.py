"""The scheduler's state: a value. Nothing that an old state can see is ever written.

Running requests are struct-of-arrays by stable *slot*: `rows i32[fields, slots]`, copied per call. Objects are touched
only for rows that are admitted, end, or cross a block. The tokens of a row are its `history` (known at admission), the
`chain` of blocks filled since, and its unfinished block in `tail`, addressed by position modulo `block_size`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from cbjax.scheduler.blocks import MIN_BLOCK_SIZE, blocks_for
from cbjax.scheduler.eviction import ARC, EvictionPolicy
from cbjax.scheduler.groups import Window, most_columns, most_held
from cbjax.scheduler.policies import Scheduler
from cbjax.scheduler.pool import BlockPool
from cbjax.scheduler.prefix import BlockHash, Prefix, blake2b_128
from cbjax.scheduler.request import Request
from cbjax.scheduler.waiting import Waiting, WaitingLine


class Field(IntEnum):
    """Columns of `SchedulerState.rows`; all zero in a slot that is not taken."""

    ACTIVE = 0  # 1 if the slot is taken
    UID = 1
    INCARNATION = 2  # admissions of this request before this one
    ORDER = 3  # admissions of anybody before this one
    PROMPT = 4  # tokens of the prompt
    PREFILL = 5  # tokens known at admission: the prompt and outputs from before a soft reset
    LENGTH = 6  # tokens known now
    COMPUTED = 7  # KV cells scheduled so far, those in flight included
    HELD = 8  # table columns in use, in every layer group; in a full one as many blocks
    DRAWN = 9  # output tokens scheduled so far, those in flight included
    LIMIT = 10  # output tokens after which it ends with "length"
    EVICTED = 11  # 1 if it lost its blocks once and has gained no token since
    CHUNK = 12  # tokens of one step, at most
    SWEPT = 13  # COMPUTED when blocks that had left their windows were last released
    REGISTERED = 14  # table columns that are registered for sharing, or were when they left their window
    FAMILY = 15  # `Request.family`


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's constants.

    Attributes:
      policy: order of candidates.
      num_blocks, block_size: the pool, in blocks and tokens.
      max_batch_tokens: tokens computed in one step.
      max_requests_per_batch: rows of one step, and slots.
      max_blocks_per_request: columns of the block table.
      safety_margin: fraction of the pool below which waiting requests are held back, in [0, 1].
      windows: of each layer group, in tokens, None for a full one; each takes its own blocks from the one pool.
      num_words: sampler words per request.
      host_blocks: blocks whose content host memory has room for; 0: who loses blocks is recomputed.
      shares_blocks: prompts that begin alike share their full blocks.
      eviction: which cached block is taken when no blank one is left.
      block_hash: of a block's content; correctness does not rest on it.

    Raises:
      ValueError: a value outside its range.
    """

    policy: Scheduler
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_requests_per_batch: int
    max_blocks_per_request: int
    safety_margin: float
    windows: tuple[Window, ...] = (None,)
    num_words: int = 1
    host_blocks: int = 0
    shares_blocks: bool = False
    eviction: EvictionPolicy = ARC
    block_hash: BlockHash = blake2b_128

    def __post_init__(self) -> None:
        if self.block_size < MIN_BLOCK_SIZE:
            raise ValueError(f"block_size must be at least {MIN_BLOCK_SIZE} tokens; got {self.block_size}")
        if not 0.0 <= self.safety_margin <= 1.0:
            raise ValueError(f"safety_margin must be in [0, 1]; got {self.safety_margin}")
        for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.host_blocks < 0:
            raise ValueError(f"host_blocks must be at least 0; got {self.host_blocks}")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows has one entry per layer group, at least 1 token or None; got {self.windows}")

    @property
    def num_groups(self) -> int:
        """Layer groups."""
        return len(self.windows)

    @property
    def max_request_tokens(self) -> int:
        """KV cells the largest request can have: what the pool and the block table both hold."""
        columns = most_columns(
            self.windows, num_blocks=self.num_blocks, block_size=self.block_size, limit=self.max_blocks_per_request
        )
        return columns * self.block_size

    def most_held(self, num_cells: int, chunk: int) -> int:
        """Blocks, over all groups, that a request of `num_cells` holds at most with steps of up to `chunk` tokens."""
        return sum(most_held(num_cells, chunk, window, self.block_size) for window in self.windows)

    def chunk_limit(self, num_cells: int) -> int:
        """Tokens of one step with which a request of `num_cells` fits the pool, at most; 0 if it never fits.

        A chunk's own cells have to be held at one time even where a window is shorter, so a pool smaller than the token
        budget serves long requests in smaller chunks.
        """
        whole = self.max_batch_tokens
        if self.most_held(num_cells, whole) <= self.num_blocks:
            return whole
        return bisect_right(range(1, whole), self.num_blocks, key=lambda chunk: self.most_held(num_cells, chunk))


class TableEntry(NamedTuple):
    """One entry of the block table."""

    group: int
    slot: int
    column: int
    block: int


class Chain(NamedTuple):
    """Blocks of output tokens filled since admission, newest first."""

    tokens: np.ndarray  # i32[block_size]
    before: Chain | None


class Record(NamedTuple):
    """The part of a row that is not numbers.

    `prefix` is the chain of the row's registered columns; None if it registers none.
    """

    request: Request
    history: np.ndarray  # i32[PREFILL], read-only
    chain: Chain | None
    table: np.ndarray  # i32[groups, HELD], read-only; `num_blocks` where the block has left the group's window
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerState:
    """See the module's docstring.

    Attributes:
      pool: who may have which block.
      waiting: who holds nothing.
      rows: i32[fields, slots].
      tail: i32[slots, block_size].
      words: u32[words, slots].
      eos: i32[slots, ids], -1 where a row has fewer ids.
      records: per slot, None where not taken.
      num_admissions: admissions so far.
      num_in_flight: plans scheduled and not yet applied by `update`.
      swaps: table entries changed since the last plan, which the next one has to tell.
      host_used: blocks in host memory.
      weights_version: of the weights that compute from now on; KV of other weights is never found.
    """

    config: SchedulerConfig
    pool: BlockPool
    waiting: WaitingLine
    rows: np.ndarray
    tail: np.ndarray
    words: np.ndarray
    eos: np.ndarray
    records: tuple[Record | None, ...]
    num_admissions: int = 0
    num_in_flight: int = 0
    swaps: tuple[TableEntry, ...] = ()
    host_used: int = 0
    weights_version: int = 0

    @property
    def num_active(self) -> int:
        return int(self.rows[Field.ACTIVE].sum())

    @property
    def is_idle(self) -> bool:
        """Nobody runs or waits and nothing is in flight."""
        return not self.num_active and not len(self.waiting) and not self.num_in_flight

    def slot_of(self, uid: int) -> int | None:
        """The slot of an active request."""
        found = np.flatnonzero((self.rows[Field.UID] == uid) & (self.rows[Field.ACTIVE] == 1))
        return int(found[0]) if len(found) else None


def initial_state(config: SchedulerConfig) -> SchedulerState:
    """Nobody runs, nobody waits, every block is free."""
    slots = config.max_requests_per_batch
    return SchedulerState(
        config=config,
        pool=BlockPool.full(config.num_blocks, num_groups=config.num_groups, policy=config.eviction),
        waiting=WaitingLine.empty(),
        rows=np.zeros((len(Field), slots), np.int32),
        tail=np.zeros((slots, config.block_size), np.int32),
        words=np.zeros((config.num_words, slots), np.uint32),
        eos=np.full((slots, 1), -1, np.int32),
        records=(None,) * slots,
    )


def known_tokens(state: SchedulerState, slot: int) -> np.ndarray:
    """Prompt and outputs of a taken slot, i32[LENGTH]."""
    record = state.records[slot]
    assert record is not None
    block_size, length = state.config.block_size, int(state.rows[Field.LENGTH, slot])
    parts = [state.tail[slot, : length % block_size]]
    chain = record.chain
    while chain is not None:
        parts.append(chain.tokens)
        chain = chain.before
    kept = length - sum(map(len, parts))
    parts.append(record.history[:kept])
    return np.concatenate(parts[::-1])


def add(state: SchedulerState, request: Request) -> SchedulerState:
    """Puts a request at the end of the waiting line.

    Raises:
      ValueError: it is empty, or can never fit the pool or its block table.
    """
    config = state.config
    if len(request.prompt) < 1:
        raise ValueError("a prompt has at least one token; got none")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {request.max_new_tokens}")
    if request.num_cells > config.max_request_tokens:
        raise ValueError(
            f"a request must fit the KV pool: {len(request.prompt)} prompt tokens and {request.max_new_tokens} new "
            f"ones need {request.num_cells} cells ({blocks_for(request.num_cells, config.block_size)} blocks of "
            f"{config.block_size}{_in_groups(config)}), and one request can hold {config.max_request_tokens} "
            f"(num_blocks={config.num_blocks}, max_blocks_per_request={config.max_blocks_per_request}); "
            "raise these or lower max_new_tokens"
        )
    return replace(state, waiting=state.waiting.push(Waiting(request=request, outputs=np.empty(0, np.int32))))


def _in_groups(config: SchedulerConfig) -> str:
    """What a refusal has to add where blocks are not simply tokens over block size."""
    return "" if config.windows == (None,) else f" in each of the layer groups with windows {config.windows}"


def renew(state: SchedulerState) -> SchedulerState:
    """The state once other weights compute: nothing that the old ones computed is ever found.

    Requests that run keep their cells and go on; their blocks are no longer registered. Copies in host memory are
    dropped, so their requests are recomputed.
    """
    records = tuple(record and record._replace(prefix=None) for record in state.records)
    return replace(
        state,
        pool=state.pool.without_cache(),
        waiting=state.waiting.without_saved(),
        records=records,
        host_used=0,
        weights_version=state.weights_version + 1,
    )
