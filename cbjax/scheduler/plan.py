"""What one step is, as data: the plan that `schedule` makes, and what the device answers.

A plan is ragged and readable; `cbjax.descriptor` pads its batch to a bucket. A row is known by (uid, incarnation),
never by its slot: slots are handed on, and with several steps in flight an answer can come after its row has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

# Steps of the longest window.
MAX_WINDOW = 16
# Ids of each row that a device is told, so that it knows when a row has ended. A request can have more: what its row
# computes after one of the others is dropped by `update`.
NUM_EOS_IDS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The rows of one step, in the order in which they were scheduled; or of a window of steps.

    A window is several decode steps that the device runs without the host: each row computes its last token, draws the
    next one and goes on with it, until it has ended or has drawn as many as it may.

    Attributes:
      uid, incarnation, slot: i32[rows], who, since which admission, and where its state lies.
      start: i32[rows], position of the first token computed, which is also the KV length before this step.
      count: i32[rows], tokens computed, at least one; in a window one per step.
      carried: bool[rows], the (only) input token is the slot's last output, which the host need not know.
      emits: bool[rows], the last token is the end of what is known, so an output token is sampled.
      output_index: i32[rows], which of the request's outputs that is (or is the first), counted from 0.
      draws: i32[rows], output tokens at most: 0 where none is sampled, over 1 only in a window.
      eos: i32[NUM_EOS_IDS, rows], ids that end the row, -1 where there are fewer.
      words: u32[words, rows], sampler settings.
      tokens: i32[sum(count)], input ids row after row; 0 where carried.
      window: steps, from 1 to `MAX_WINDOW`; over 1 only if every row is carried.
    """

    uid: np.ndarray
    incarnation: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    count: np.ndarray
    carried: np.ndarray
    emits: np.ndarray
    output_index: np.ndarray
    draws: np.ndarray
    eos: np.ndarray
    words: np.ndarray
    tokens: np.ndarray
    window: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.uid)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def kv_reads(self) -> int:
        """KV cells computed by earlier steps that this one reads; those of a window read each other's."""
        if self.window == 1:
            return int(self.start.sum())
        return int((self.draws * (2 * self.start + self.draws - 1)).sum()) // 2

    @property
    def num_computed(self) -> int:
        """Tokens computed, over all steps of a window, if nobody ends before its last draw."""
        return self.num_tokens if self.window == 1 else int(self.draws.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableDelta:
    """Entries to write into the device's block table before the step: i32[entries] each, no entry twice.

    `block` is `num_blocks` where a block has left its group's window.
    """

    group: np.ndarray
    slot: np.ndarray
    column: np.ndarray
    block: np.ndarray

    @classmethod
    def empty(cls) -> TableDelta:
        """No entries."""
        none = np.empty(0, np.int32)
        return cls(group=none, slot=none, column=none, block=none)

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftReset:
    """A request that lost its blocks: it waits again, and its known tokens are prefilled when it returns.

    Attributes:
      uid, slot: who, and the slot it left.
      num_blocks: blocks given back.
      num_tokens: tokens whose KV has to be computed again, unless it is still found when the request returns.
    """

    uid: int
    slot: int
    num_blocks: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offload:
    """Blocks whose content is kept in host memory before they are handed on.

    Attributes:
      uid: whose they are; a request has at most one such copy.
      slot: the slot it left.
      blocks: i32[blocks], in an order that `Restore.index` refers to.
    """

    uid: int
    slot: int
    blocks: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restore:
    """Content that comes back from host memory; the copy there is not needed any more.

    Attributes:
      uid: whose it is.
      index: i32[blocks], which blocks of the copy; others are not needed.
      blocks: i32[blocks], where to.
    """

    uid: int
    index: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCopies:
    """Blocks to copy on the device: i32[copies] each; all sources are read before any destination is written."""

    sources: np.ndarray
    destinations: np.ndarray

    def __len__(self) -> int:
        return len(self.sources)


NO_COPIES = BlockCopies(sources=np.empty(0, np.int32), destinations=np.empty(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that left the waiting line for a slot.

    Attributes:
      uid, slot: who, and where its state lies from now on.
      incarnation: how many times it was admitted before.
      num_cached: tokens whose KV was found, in registered blocks or those of a running request with the same prompt,
        and is not computed again.
      num_forked: those of them that are a running request's with the same prompt.
      num_restored: tokens after those whose KV came back from host memory.
    """

    uid: int
    slot: int
    incarnation: int
    num_cached: int
    num_forked: int = 0
    num_restored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step: who runs how many tokens from which position into which blocks, and who lost its blocks for it.

    Attributes:
      batch: the rows; none if nothing can run.
      table: changed block-table entries.
      soft_resets: victims whose KV is dropped, in the order in which they were chosen.
      offloads: victims whose blocks go to host memory first.
      restores: what comes back from there, after that and before the batch.
      copies: of blocks that are not full, for forks; after the restores.
      admitted: who was admitted, in order.
      num_starved: active requests that got no block in this step.
      drain: nothing was decided, since pressure must be decided with every token known: finish the steps in
        flight with `update`, then schedule again.
    """

    batch: Batch
    table: TableDelta
    soft_resets: tuple[SoftReset, ...] = ()
    offloads: tuple[Offload, ...] = ()
    restores: tuple[Restore, ...] = ()
    copies: BlockCopies = NO_COPIES
    admitted: tuple[Admission, ...] = ()
    num_starved: int = 0
    drain: bool = False

    @property
    def is_empty(self) -> bool:
        return self.batch.num_rows == 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutputs:
    """What the device answers for a plan's rows, in the plan's order, for each step of its window.

    Where a row has ended or does not emit, tokens and logprobs are meaningless and `finite` is not False.

    Attributes:
      tokens: i32[window, rows], the sampled token.
      logprobs: f32[window, rows], its log-probability; 0 where not asked for.
      finite: bool[window, rows], the row's logits were finite.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request's end. `reason` is "stop" (`token` is the EOS id that ended it), "length" or "failed"."""

    uid: int
    reason: str
    token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResults:
    """What a step means for the requests, as `update` read it.

    Attributes:
      uid, count: i32/int[requests], who has output tokens more, in the plan's order, and how many.
      tokens, logprobs: i32/f32[sum of count], request by request, in the order in which they were drawn.
      ended: requests that have no further step.
    """

    uid: np.ndarray
    count: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    ended: tuple[Ended, ...]
