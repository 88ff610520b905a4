"""The memory plan: what the engine may take, line by line, and how many blocks and tokens a step can then have.

Pure: sizes in, a plan out. `plan_memory` is given the budgets that were asked for or decided from hints, and solves the
rest; the sum of its lines never exceeds its budget. Temporaries are an estimate until programs are compiled: `checked`
puts what the compiler says in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cbjax.sampling.params import NUM_WORDS
from cbjax.scheduler import NUM_RESERVED_BLOCKS, Window

# Of the budget, for what nobody can count beforehand: an allocator's rounding and gaps.
SAFETY_SHARE = 0.005
# Of the budget, what a step's activations and its logits may take before max_batch_tokens and the rows are lowered.
TEMPORARY_SHARE = 0.25
MIN_BATCH_TOKENS = 256
MIN_ROWS = 2
# Numbers of 4 bytes that a row has in a descriptor and in the answers to it, sampling words not counted; at most.
_ROW_NUMBERS = 128
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What sizing needs of a model.

    Attributes:
      block_bytes_per_token: KV bytes of one token over all arrays of the store, which is over the layers of one group.
      token_bytes: temporaries of one token in a step.
      row_bytes: temporaries of one row of logits.
      max_positions: positions the model was made for, in tokens.
      windows: of each layer group, in tokens, None for a full one.
      weight_bytes, unplaced_weight_bytes: of all weights; of those that are not on the device yet.
      layout: device bytes of the store for each byte of its numbers; above 1 where the device pads its tiles.
      blocks_per_copy: blocks that one call moves within the store, out of it, or into it.
      blocks_in_flight: blocks that are on their way to or from host memory at one time, beside the store.
    """

    block_bytes_per_token: int
    token_bytes: int
    row_bytes: int
    max_positions: int
    windows: tuple[Window, ...] = (None,)
    weight_bytes: int = 0
    unplaced_weight_bytes: int = 0
    layout: float = 1.0
    blocks_per_copy: int = 1
    blocks_in_flight: int = 1

    def block_bytes(self, block_size: int) -> int:
        """Device bytes of one block of that many tokens, over all arrays of the store."""
        return -int(-block_size * self.block_bytes_per_token * self.layout // 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """What takes memory, how much in bytes, and why."""

    name: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the budget is spent.

    Attributes:
      budget: bytes that the engine may take; `source` says of what.
      lines: what takes them.
      fits: blocks that would fill the budget.
      estimate: bytes of temporaries that were set aside, which is what the line of that name has.
      measured: the largest temporaries of the compiled programs, and that program's name; None: none is compiled, or
        the compiler does not tell.
    """

    budget: int
    source: str
    lines: tuple[MemoryLine, ...]
    fits: int
    estimate: int
    measured: tuple[int, str] | None = None

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def left(self) -> int:
        """Bytes of the budget that nothing takes."""
        return self.budget - self.total

    @property
    def excess(self) -> int:
        """Bytes beyond the budget once temporaries are what the compiler says; 0 if it holds."""
        measured = self.estimate if self.measured is None else self.measured[0]
        return max(0, measured - self.estimate - self.left)

    def checked(self, temporaries: Mapping[str, int]) -> MemoryPlan:
        """The plan with what compiled programs take in temporaries: bytes by name."""
        name = max(temporaries, key=temporaries.__getitem__, default=None)
        return self if name is None or not temporaries[name] else replace(self, measured=(temporaries[name], name))

    def __str__(self) -> str:
        entries = [(line.name, line.num_bytes, line.why) for line in self.lines]
        entries += [("sum", self.total, f"{self.total / max(self.budget, 1):.1%} of the budget")]
        entries += [("budget", self.budget, self.source)]
        width = max(len(name) for name, _, _ in entries)
        rows = [f"{name.ljust(width)}  {num_bytes / _MIB:>12,.1f} MiB  {why}" for name, num_bytes, why in entries]
        return "\n".join([*rows, self._told()])

    def _told(self) -> str:
        """How the estimate of temporaries compares with the compiler's figure."""
        if self.measured is None:
            return "temporaries are an estimate: no program is compiled yet"
        num_bytes, name = self.measured
        difference = f"{(num_bytes - self.estimate) / _MIB:+,.1f} MiB from the estimate"
        told = f"temporaries by the compiler: {num_bytes / _MIB:,.1f} MiB at most, in {name}; {difference}"
        if self.excess:
            told += f"; {self.excess / _MIB:,.1f} MiB above the budget: lower max_batch_tokens or num_blocks"
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What memory is planned for.

    Attributes:
      block_size: tokens.
      tokens, rows, columns: of a step at most; of the block table.
      steps_in_flight: steps that the device has while the next one is planned.
      moves_blocks: whether blocks go to host memory and come back.
    """

    block_size: int
    tokens: int
    rows: int
    columns: int
    steps_in_flight: int = 0
    moves_blocks: bool = False


def affordable_tokens(budget: int, model: ModelFacts, wanted: int) -> int:
    """Tokens of a step whose activations leave the pool its share of the budget, `wanted` at most."""
    return min(wanted, max(MIN_BATCH_TOKENS, _share(budget, model) // max(1, model.token_bytes)))


def affordable_rows(budget: int, model: ModelFacts, sizes: Sizes) -> int:
    """Rows, `sizes.rows` at most, that leave the pool its share, and a block for each of them in every layer group."""
    groups, low = len(model.windows), min(MIN_ROWS, sizes.rows)
    high = min(sizes.rows, max(low, _share(budget, model) // max(1, model.row_bytes)))
    while low < high:
        rows = (low + high + 1) // 2
        if blocks_that_fit(budget, model, replace(sizes, rows=rows)) >= rows * groups:
            low = rows
        else:
            high = rows - 1
    return low


def _share(budget: int, model: ModelFacts) -> int:
    return int((budget - model.unplaced_weight_bytes) * TEMPORARY_SHARE)


def blocks_that_fit(budget: int, model: ModelFacts, sizes: Sizes) -> int:
    """Blocks that can be handed out when the pool takes what everything else leaves; negative: it takes more."""
    beside = sum(line.num_bytes for line in _beside(budget, model, sizes))
    return (budget - beside) // model.block_bytes(sizes.block_size) - NUM_RESERVED_BLOCKS


def plan_memory(budget: int, source: str, model: ModelFacts, sizes: Sizes, num_blocks: int) -> MemoryPlan:
    """The plan for these sizes and a pool of `num_blocks`, which must be at most `blocks_that_fit`."""
    block = model.block_bytes(sizes.block_size)
    of = f"blocks of {sizes.block_size} tokens, {block / _MIB:.3g} MiB each"
    if model.layout > 1:
        of += f" ({model.layout:.3g} times their numbers, as the device pads them)"
    store = MemoryLine(name="KV store", num_bytes=num_blocks * block, why=f"{num_blocks:,} {of}")
    reserved = MemoryLine(
        name="reserved blocks", num_bytes=NUM_RESERVED_BLOCKS * block, why="what padding reads and writes"
    )
    return MemoryPlan(
        budget=budget,
        source=source,
        lines=(store, reserved, *_beside(budget, model, sizes)),
        fits=blocks_that_fit(budget, model, sizes),
        estimate=_temporaries(model, sizes),
    )


def _temporaries(model: ModelFacts, sizes: Sizes) -> int:
    """Of the program that takes most: a step's activations are gone when its logits are there."""
    return max(sizes.tokens * model.token_bytes, sizes.rows * model.row_bytes, _copied(model, sizes))


def _copied(model: ModelFacts, sizes: Sizes) -> int:
    """The blocks of one call that copies blocks: what is read, and what is written before it is in its place."""
    return 2 * model.blocks_per_copy * model.block_bytes(sizes.block_size)


def _beside(budget: int, model: ModelFacts, sizes: Sizes) -> list[MemoryLine]:
    """All lines but those of the store."""
    placed = (model.weight_bytes - model.unplaced_weight_bytes) / _MIB
    steps = 1 + sizes.steps_in_flight
    table = len(model.windows) * (sizes.rows + 1) * (sizes.columns + 2)
    groups, at_once = _counted(len(model.windows), "layer group"), _counted(steps, "step")
    numbers = sizes.tokens + sizes.rows * (_ROW_NUMBERS + NUM_WORDS)
    moved = model.blocks_in_flight * model.block_bytes(sizes.block_size) * sizes.moves_blocks
    copy = _copied(model, sizes)
    activations, logits = sizes.tokens * model.token_bytes, sizes.rows * model.row_bytes
    return [
        MemoryLine(
            name="weights",
            num_bytes=model.unplaced_weight_bytes,
            why=f"to be placed on the device; {placed:,.1f} MiB are there and not counted as free",
        ),
        MemoryLine(
            name="temporaries",
            num_bytes=_temporaries(model, sizes),
            why=f"the largest of: activations of {sizes.tokens:,} tokens {activations / _MIB:,.1f}, logits of "
            f"{sizes.rows:,} sampled rows {logits / _MIB:,.1f}, the blocks copied in one call, twice, "
            f"{copy / _MIB:,.1f}",
        ),
        MemoryLine(
            name="block table",
            num_bytes=4 * table,
            why=f"{sizes.rows:,} rows of {sizes.columns:,} blocks in {groups}, and slot state",
        ),
        MemoryLine(name="inputs and answers", num_bytes=4 * numbers * steps, why=f"of {at_once} at a time"),
        MemoryLine(
            name="blocks on their way",
            num_bytes=moved,
            why="to and from host memory: there twice for a moment" if moved else "no host tier",
        ),
        MemoryLine(
            name="safety", num_bytes=int(budget * SAFETY_SHARE), why=f"{SAFETY_SHARE:.1%}: an allocator's rounding"
        ),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
