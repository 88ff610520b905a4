"""`resolve`: from what was asked, hints and machine facts to what is used. Pure, and told in full by `report()`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from cbjax.config import ContinuousBatchingConfig, WorkloadHints
from cbjax.ladder import MIN_DECODE_ROWS, Ladder
from cbjax.ladder_settings import choose_ladder
from cbjax.machine import MachineFacts
from cbjax.memory_plan import (
    MIN_BATCH_TOKENS,
    TEMPORARY_SHARE,
    MemoryPlan,
    Sizes,
    affordable_rows,
    affordable_tokens,
    blocks_that_fit,
    plan_memory,
)
from cbjax.memory_plan import ModelFacts as ModelFacts
from cbjax.overlap import Overlap, resolve_overlap
from cbjax.sampling.params import NUM_WORDS
from cbjax.scheduler import (
    NUM_RESERVED_BLOCKS,
    SchedulerConfig,
    blocks_for,
    eviction_named,
    held_together,
    most_columns,
    scheduler_named,
)

# The block table's width without hints, in blocks of the default size: 32 x 256 = 8192 tokens.
FALLBACK_BLOCKS_PER_REQUEST = 32
FALLBACK_REQUEST_TOKENS = FALLBACK_BLOCKS_PER_REQUEST * ContinuousBatchingConfig().block_size
_CPU_DEFAULTS = {"max_batch_tokens": 512, "max_requests_per_batch": 64, "max_memory_percent": 0.6}
# Main memory is for everybody: without hints the pool of a CPU holds no more tokens than this.
UNHINTED_CPU_TOKENS = 32_768
_ACCELERATOR_DEFAULTS = {"max_batch_tokens": 8192, "max_requests_per_batch": 1024, "max_memory_percent": 0.9}
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One field: what was asked, what is used, and why."""

    field: str
    asked: object
    used: object
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine uses.

    Attributes:
      scheduler: budgets, pool and policy.
      ladder: buckets.
      num_bytes: of the KV store on the device, the two reserved blocks included.
      memory: what is planned to take memory, the store and all beside it.
      host_blocks: blocks that the host tier holds; 0: there is none.
      overlap: how far the host runs ahead of the device.
      decisions: every field's, in order.
    """

    config: ContinuousBatchingConfig
    scheduler: SchedulerConfig
    ladder: Ladder
    num_bytes: int
    memory: MemoryPlan
    host_blocks: int
    overlap: Overlap
    decisions: tuple[Decision, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all arrays of the store."""
        return self.num_bytes // (self.scheduler.num_blocks + NUM_RESERVED_BLOCKS)

    def report(self) -> str:
        """A table of what was asked and what is used; whatever was asked for and not given stands here."""
        rows = [("setting", "asked", "used", "why")]
        rows += [(d.field, str(d.asked), str(d.used), d.why) for d in self.decisions]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]
        pool = self.scheduler
        tokens = f"{pool.num_blocks * pool.block_size} tokens"
        if pool.num_groups > 1:
            tokens += f" of one layer group ({pool.num_groups} groups share them)"
        lines.append(
            f"pool: {tokens}, {self.num_bytes / _MIB:.1f} MiB with the two reserved blocks; with all beside it "
            f"{self.memory.total / _MIB:,.1f} of {self.memory.budget / _MIB:,.1f} MiB"
        )
        lines.append("programs: " + ", ".join(map(str, self.ladder.buckets)))
        return "\n".join(lines)


def for_call(resolved: ResolvedConfig, config: ContinuousBatchingConfig, machine: MachineFacts) -> ResolvedConfig:
    """The same decisions for a config that differs only in what a call may change.

    Raises:
      ValueError: as `resolve_overlap`.
    """
    overlap = resolve_overlap(config, machine)
    changed = {decision.field: decision for decision in _per_call(config, overlap)}
    decisions = tuple(changed.get(decision.field, decision) for decision in resolved.decisions)
    return replace(resolved, config=config, overlap=overlap, decisions=decisions)


def blocks_from_hints(max_prompt: int, max_generated: int, block_size: int) -> int:
    """Columns of the block table for the longest request hinted: its blocks and one more, rounded up to even."""
    blocks = blocks_for(max_prompt + max_generated, block_size) + 1
    return blocks + blocks % 2


def resolve(
    config: ContinuousBatchingConfig, hints: WorkloadHints, machine: MachineFacts, model: ModelFacts
) -> ResolvedConfig:
    """Decides every field that was left open.

    Raises:
      ValueError: the pool that was asked for, or the smallest useful one, does not fit into memory.
    """
    defaults = _CPU_DEFAULTS if machine.platform == "cpu" else _ACCELERATOR_DEFAULTS
    percent = config.max_memory_percent if config.max_memory_percent is not None else defaults["max_memory_percent"]
    budget = int(machine.free_bytes * percent)
    decisions = [
        Decision(field="max_memory_percent", asked=config.max_memory_percent, used=percent,
                 why=f"{budget / 2**30:.2f} GiB of {machine.free_bytes / 2**30:.2f} free, by {machine.source}"),
        Decision(field="block_size", asked=config.block_size, used=config.block_size, why="tokens"),
    ]  # fmt: skip
    tokens = _batch_tokens(config, defaults, budget, model, decisions)
    block_bytes = model.block_bytes(config.block_size)
    overlap = resolve_overlap(config, machine)
    sizes = Sizes(
        block_size=config.block_size,
        tokens=tokens,
        rows=min(config.max_requests_per_batch or defaults["max_requests_per_batch"], tokens),
        columns=_fillable(_wanted_columns(config, hints)[0], config.num_blocks or budget // block_bytes, config, model),
        moves_blocks=config.cpu_offload_space > 0,
        steps_in_flight=overlap.depth,
    )
    rows_wanted, sizes = sizes.rows, _with_rows(config, budget, model, sizes)
    num_blocks = _num_blocks(config, hints, budget, model, sizes, decisions, on_cpu=machine.platform == "cpu")
    rows = _rows(config, rows_wanted, min(sizes.rows, num_blocks // len(model.windows)), decisions)
    columns = _columns(config, hints, num_blocks, model, decisions)
    memory = plan_memory(budget, decisions[0].why, model, replace(sizes, rows=rows, columns=columns), num_blocks)
    policy = scheduler_named(config.scheduler_type)
    need = _workload_blocks(config, hints, model, tokens, rows)
    margin = _margin(config, need, num_blocks, policy.default_safety_margin, decisions)
    num_bytes = (num_blocks + NUM_RESERVED_BLOCKS) * block_bytes
    host_blocks = _host_blocks(config, machine, model, num_bytes, decisions)
    choice = choose_ladder(config, tokens=tokens, rows=rows, most_rows=rows_wanted)
    decisions += [
        Decision(field=field, asked=getattr(config, field), used=used, why=why) for field, used, why in choice.settings
    ]
    decisions += [*_fixed(config, hints), *_per_call(config, overlap)]
    scheduler = SchedulerConfig(
        policy=policy,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_batch_tokens=tokens,
        max_requests_per_batch=rows,
        max_blocks_per_request=columns,
        safety_margin=margin,
        windows=model.windows,
        num_words=NUM_WORDS,
        shares_blocks=config.allow_block_sharing,
        eviction=eviction_named(config.eviction_policy),
        host_blocks=host_blocks,
    )
    return ResolvedConfig(
        config=config,
        scheduler=scheduler,
        ladder=choice.ladder,
        num_bytes=num_bytes,
        memory=memory,
        host_blocks=host_blocks,
        overlap=overlap,
        decisions=tuple(decisions),
    )


def _batch_tokens(config, defaults, budget: int, model: ModelFacts, decisions: list[Decision]) -> int:
    asked, used, why = config.max_batch_tokens, config.max_batch_tokens, "as asked"
    if asked is None:
        used, why = defaults["max_batch_tokens"], "default of the platform"
        affordable = affordable_tokens(budget, model, used)
        if affordable < used:
            used = affordable
            why = f"what {TEMPORARY_SHARE:.0%} of the memory holds in temporaries, at least {MIN_BATCH_TOKENS}"
    decisions.append(Decision(field="max_batch_tokens", asked=asked, used=used, why=why))
    return used


def _workload_blocks(config, hints: WorkloadHints, model: ModelFacts, tokens: int, rows: int) -> int:
    """Blocks that hold the workload at its longest, as many requests as run at one time; 0 if nothing is known."""
    longest = min(hints.max_prompt_length + hints.max_generated_length, model.max_positions)
    sizes = [(longest, min(hints.num_requests or rows, rows))]
    return held_together(sizes, windows=model.windows, block_size=config.block_size, max_batch_tokens=tokens)


def _with_rows(config, budget: int, model: ModelFacts, sizes: Sizes) -> Sizes:
    """As many rows as are asked for; if none are, at most one for each block that the pool can have then."""
    if config.max_requests_per_batch is not None:
        return sizes
    if config.num_blocks is None:
        return replace(sizes, rows=affordable_rows(budget, model, sizes))
    blocks = max(config.num_blocks // len(model.windows), MIN_DECODE_ROWS)
    return replace(sizes, rows=min(sizes.rows, blocks))


def _num_blocks(config, hints, budget, model, sizes: Sizes, decisions: list[Decision], *, on_cpu: bool) -> int:
    fits = blocks_that_fit(budget, model, sizes)
    asked = config.num_blocks
    if asked is not None:
        used, why = asked, f"as asked; {fits} fit"
    else:
        used, why = fits, "what fits beside everything else (memory plan)"
        need = _workload_blocks(config, hints, model, sizes.tokens, sizes.rows)
        if not need and on_cpu and fits * config.block_size > UNHINTED_CPU_TOKENS:
            used = blocks_for(UNHINTED_CPU_TOKENS, config.block_size)
            why = f"no hints: {UNHINTED_CPU_TOKENS} tokens on a CPU; {fits} would fit"
        elif 0 < need < fits:
            used, why = need, f"what the workload can need; {fits} would fit"
    if used > fits or used < 1:
        plan = plan_memory(budget, "", model, sizes, 0)
        raise ValueError(
            f"the KV pool must fit into memory: num_blocks={max(used, 1)} blocks of "
            f"{model.block_bytes(config.block_size) / _MIB:.2f} MiB and {plan.total / _MIB:.0f} MiB for what is beside "
            f"them (most for {max(plan.lines, key=lambda line: line.num_bytes).name}) against {budget / _MIB:.0f} MiB, "
            f"which hold {max(fits, 0)} blocks; "
            "lower num_blocks, max_batch_tokens or max_requests_per_batch, or raise max_memory_percent"
        )
    decisions.append(Decision(field="num_blocks", asked=asked, used=used, why=why))
    return used


def _rows(config, wanted: int, blocks_per_group: int, decisions: list[Decision]) -> int:
    asked, used = config.max_requests_per_batch, wanted
    why = "as asked" if asked == used else "at most max_batch_tokens" if asked else "default of the platform"
    if asked is None and blocks_per_group < used:
        used, why = max(blocks_per_group, MIN_DECODE_ROWS), "every row holds a block at least, and its logits"
    decisions.append(Decision(field="max_requests_per_batch", asked=asked, used=used, why=why))
    return used


def _wanted_columns(config, hints) -> tuple[int, str]:
    """Columns of the block table in a pool that holds any request, and why."""
    if config.max_blocks_per_request:
        return config.max_blocks_per_request, "as asked"
    if hints.max_prompt_length + hints.max_generated_length:
        used = blocks_from_hints(hints.max_prompt_length, hints.max_generated_length, config.block_size)
        why = "the longest request hinted"
    else:
        used = max(FALLBACK_BLOCKS_PER_REQUEST, blocks_for(FALLBACK_REQUEST_TOKENS, config.block_size))
        why = f"no hints: at least {FALLBACK_REQUEST_TOKENS} tokens"
    return used, why if config.max_blocks_per_request is None else f"{why}; without decode programs"


def _fillable(columns: int, num_blocks: int, config, model: ModelFacts) -> int:
    """As many of these columns as a request can fill in that pool; at least one."""
    fillable = most_columns(model.windows, num_blocks=num_blocks, block_size=config.block_size, limit=columns)
    return min(columns, max(fillable, 1))


def _columns(config, hints, num_blocks: int, model: ModelFacts, decisions: list[Decision]) -> int:
    asked = config.max_blocks_per_request
    used, why = _wanted_columns(config, hints)
    fillable = _fillable(used, num_blocks, config, model)
    if used > fillable:
        used, why = fillable, "no request can hold more than the pool"
    decisions.append(Decision(field="max_blocks_per_request", asked=asked, used=used, why=why))
    return used


def _margin(config, need: int, num_blocks: int, default: float, decisions: list[Decision]) -> float:
    asked, used, why = config.safety_margin, config.safety_margin, "as asked"
    if asked is None:
        used, why = default, "default of the policy: fraction of the pool kept from waiting requests"
        if 0 < need <= num_blocks:
            used, why = 0.0, "the pool holds every request at its longest, so nobody can lack a block"
    decisions.append(Decision(field="safety_margin", asked=asked, used=used, why=why))
    return used


def _host_blocks(config, machine: MachineFacts, model: ModelFacts, pool: int, decisions: list[Decision]) -> int:
    """Blocks of the host tier; `pool` is the bytes of the store, which a CPU takes from the same memory."""
    space, threshold = config.cpu_offload_space, config.cpu_offload_space_safety_threshold
    blocks, used, why = 0, 0.0, "requests that lose their blocks are recomputed"
    why_threshold = "without effect: no host-memory tier"
    if space:
        most, why_threshold = _host_bytes(threshold, machine, pool)
        block_bytes = config.block_size * model.block_bytes_per_token  # host memory pads nothing
        blocks = int(min(space * _GIB, most)) // block_bytes
        size = f"of {block_bytes / _MIB:.3g} MiB"
        if not blocks:
            why = f"not given: it holds no block {size}; {why}"
        else:
            used = round(min(space, most / _GIB), 3)
            why = f"{blocks} blocks {size} in {machine.host_memory}"
            if machine.platform == "cpu":
                why += "; on a CPU that is the pool's own memory, so the tier saves work and no memory"
        if most < space * _GIB:
            why += f"; at most {threshold:.0%} {why_threshold}"
    decisions += [
        Decision(field="cpu_offload_space", asked=space, used=used, why=why),
        Decision(field="cpu_offload_space_safety_threshold", asked=threshold, used=threshold, why=why_threshold),
    ]
    return blocks


def _host_bytes(threshold: float, machine: MachineFacts, pool: int) -> tuple[float, str]:
    """Bytes that the host tier may take, and what they are a share of."""
    if machine.available_ram_bytes is None:
        return sys.maxsize, "without effect: the available main memory is not known"
    if machine.platform != "cpu":
        return threshold * machine.available_ram_bytes, f"of {machine.available_ram_bytes / _GIB:.2f} GiB available"
    beside = max(0, machine.available_ram_bytes - pool)
    return threshold * beside, f"of {beside / _GIB:.2f} GiB available beside the pool"


def _fixed(config: ContinuousBatchingConfig, hints: WorkloadHints) -> list[Decision]:
    def decision(field: str, used: object, why: str) -> Decision:
        return Decision(field=field, asked=getattr(config, field), used=used, why=why)

    return [
        decision("scheduler_type", config.scheduler_type, "as asked"),
        decision("allow_block_sharing", config.allow_block_sharing, _why_sharing(config, hints)),
        decision("eviction_policy", config.eviction_policy, "which cached block is taken when no blank one is left"),
        decision("use_cuda_graph", False, "every step is one compiled program"),
        decision("per_request_processors", True, "sampling settings are always per request"),
        decision("batch_invariant", "not yet" if config.batch_invariant else False, _why_invariant(config)),
        decision("max_queue_size", 0, "requests are handed to the engine directly"),
    ]


def _why_sharing(config: ContinuousBatchingConfig, hints: WorkloadHints) -> str:
    if not config.allow_block_sharing:
        return "off, as asked"
    longest, size = hints.max_prompt_length, config.block_size
    if 0 < longest <= size:
        return f"no prompt will be found: {longest} tokens at most, and only full blocks of {size} with one more are"
    return f"prompts that begin alike share full blocks of {size} tokens"


def _why_invariant(config: ContinuousBatchingConfig) -> str:
    if config.batch_invariant:
        return "the first call compiles and compares every program"
    return "off: bits may depend on a request's batch; tokens in float32 do not, but for near ties"


def _per_call(config: ContinuousBatchingConfig, overlap: Overlap) -> list[Decision]:
    """The fields that a call may change without a new store or program."""
    logprobs, seed = config.return_logprobs, config.seed
    drawn = "drawn anew for each call" if seed is None else "as asked"

    def overlapped(field: str, used: object, why: str) -> Decision:
        return Decision(field=field, asked=getattr(config, field), used=used, why=why)

    latency = config.max_window_latency
    return [
        overlapped("use_async_batching", overlap.depth > 0, overlap.why_depth),
        overlapped("async_depth", overlap.depth, "steps in flight while the next one is planned"),
        overlapped("decode_window", overlap.window, overlap.why_window),
        overlapped("max_window_latency", latency, "seconds that a window takes at most, in a manager and in stream"),
        Decision(field="return_logprobs", asked=logprobs, used=logprobs, why="as asked"),
        Decision(field="seed", asked=seed, used="random" if seed is None else seed, why=drawn),
    ]
