"""A session: one engine with its store and programs, kept between calls that ask for the same settings."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from cbjax.attention import (
    Attention,
    AttentionChoice,
    LayerGroups,
    Place,
    choose_attention,
    layer_groups,
    store_spec,
)
from cbjax.cache import (
    CALLS_IN_FLIGHT,
    HostTier,
    PagedAttentionCache,
    blocks_per_call,
    layout_factor,
)
from cbjax.compilation_cache import enable_compilation_cache, program_folder
from cbjax.compile_plan import CompilePlan, plan_programs
from cbjax.config import ContinuousBatchingConfig, WorkloadHints
from cbjax.descriptor import Bucket
from cbjax.engine import Engine
from cbjax.invariance import Proof, prove
from cbjax.machine import MachineFacts, machine_facts
from cbjax.memory_plan import MemoryPlan
from cbjax.pace import Pace
from cbjax.program_store import ProgramStore
from cbjax.programs import ModelDevice, Program
from cbjax.progress import progress
from cbjax.resolve import Decision, ModelFacts, ResolvedConfig, for_call, resolve
from cbjax.scheduler import blocks_for, held_together

if TYPE_CHECKING:
    from cbjax.causal_lm import CausalLM

log = logging.getLogger(__name__)


class Session:
    """Attributes:
    resolved: the settings in use.
    engine, device: what runs.
    proof: what was found of the programs' bits; None: not looked at.
    """

    def __init__(self, lm: CausalLM, config: ContinuousBatchingConfig, hints: WorkloadHints) -> None:
        self.key = session_key(config)
        groups = layer_groups(lm.layers, max_positions=lm.max_positions)
        self.machine: MachineFacts = machine_facts()
        choice = attention_of(lm, config, self.machine)
        self.model_facts = model_facts(lm, groups, config.block_size, choice.attention)
        cache_in_use = enable_compilation_cache() if config.compilation_cache else "off, as asked"
        resolved = resolve(config, hints, self.machine, self.model_facts)
        decision = Decision(
            field="compilation_cache",
            asked=config.compilation_cache,
            used=cache_in_use,
            why="compiled programs on disk",
        )
        attention = Decision(
            field="attn_implementation", asked=config.attn_implementation, used=choice.used, why=choice.why
        )
        decisions = (*resolved.decisions, attention, decision, layer_groups_decision(groups))
        self.resolved: ResolvedConfig = replace(resolved, decisions=decisions)
        scheduler = resolved.scheduler
        cache = PagedAttentionCache(
            groups,
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            dtype=lm.dtype,
            attention=choice.attention,
        )
        host_tier = HostTier(self.machine.host_memory.kind) if resolved.host_blocks else None
        is_kept = config.compilation_cache and lm.description and not choice.is_interpreted
        folder = program_folder() if is_kept else None
        store = None if folder is None else ProgramStore(folder, lm.description)
        self.device = ModelDevice(lm.bind, lm.params, cache, scheduler, host_tier=host_tier, store=store)
        self.device.on_compiled = lm.tracer.compiled
        self.engine = Engine(
            self.device,
            scheduler,
            resolved.ladder,
            vocab_size=lm.vocab_size,
            max_positions=lm.max_positions,
            depth=resolved.overlap.depth,
            pace=Pace(max_window=resolved.overlap.window),
            observers=lm.observers,
            tracer=lm.tracer,
        )
        self.proof: Proof | None = None
        if config.batch_invariant:
            self.engine.ladder = resolved.ladder.only(())
        log.info("session: %s\n%s", self.machine.device, self.resolved.report())

    def adopt(self, config: ContinuousBatchingConfig) -> None:
        """Goes on under a config of the same `session_key`; no request is alive.

        Raises:
          ValueError: it asks for what cannot be; nothing changes.
        """
        self.resolved = for_call(self.resolved, config, self.machine)
        self.engine.depth = self.resolved.overlap.depth
        self.engine.pace.max_window = self.resolved.overlap.window

    def covers(self, hints: WorkloadHints, *, open_ended: bool = False) -> bool:
        """Whether this session is as good as a new one for such a workload.

        It is not if its pool was sized for a smaller workload and memory allows a larger pool.

        Args:
          open_ended: anything may come where the hints say nothing; else they are the whole workload.
        """
        if not hints.num_requests and not open_ended:
            return True
        mine = self.resolved.scheduler
        wanted = resolve(self.resolved.config, hints, self.machine, self.model_facts).scheduler
        longest = min(hints.max_prompt_length + hints.max_generated_length, self.model_facts.max_positions)
        columns = wanted.max_blocks_per_request
        if longest:
            columns = min(blocks_for(longest, mine.block_size), columns)
        return wanted.num_blocks <= mine.num_blocks and columns <= mine.max_blocks_per_request

    def warmup(
        self, buckets: Sequence[Bucket] | None = None, *, forks: bool | None = None, progress_bar: bool = False
    ) -> list[Program]:
        """Compiles what is missing for these buckets (None: the whole ladder), and for `forks` (None: with the ladder).

        A batch-invariant session needs the whole ladder, and no step runs before this has compared its programs.

        Returns:
          The programs compiled now.

        Raises:
          InvarianceError: no program of a batch-invariant session can be used.
        """
        forks = buckets is None if forks is None else forks
        if not self.resolved.config.batch_invariant:
            buckets = self.resolved.ladder.buckets if buckets is None else buckets
            return self._compile(self.device.missing(buckets, forks=forks), progress_bar)
        compiled = self._compile(self.device.missing((), forks=forks), progress_bar)
        if self.proof is None:
            compiled += self._prove(progress_bar)
        return compiled

    def _prove(self, progress_bar: bool) -> list[Program]:
        """Compiles and compares the ladder; what differs is left out of it."""
        ladder = self.resolved.ladder
        proof = prove(
            self.device,
            ladder,
            lambda buckets: self._compile(buckets, progress_bar),
            vocab_size=self.engine.vocab_size,
            max_positions=self.engine.max_positions,
        )
        if proof.differing:
            log.warning("batch_invariant: %s", proof.why)
        kept = ladder.only(set(ladder.buckets) - proof.differing.keys())
        changed = [
            replace(decision, used=proof.used, why=proof.why) if decision.field == "batch_invariant" else decision
            for decision in self.resolved.decisions
        ]
        self.resolved = replace(self.resolved, ladder=kept, decisions=tuple(changed))
        self.proof, self.engine.ladder = proof, kept
        return [self.device.programs[bucket] for bucket in ladder.buckets]

    def _compile(self, missing: Sequence[Bucket | str], progress_bar: bool) -> list[Program]:
        compiled = []
        show = progress_bar and bool(missing)
        with progress(show=show, total=len(missing), desc="compiling", unit="program", leave=False) as bar:
            for program in self.device.compile_all(missing):
                compiled.append(program)
                bar.update()
                bar.set_postfix_str(program.name)
                log.info(
                    "compiled %s in %.2f s, %d bytes of temporaries",
                    program.name,
                    program.seconds,
                    program.temp_bytes,
                )
        if compiled and (plan := self.memory_plan()).excess:
            log.warning("memory: programs take more than was planned\n%s", plan)
        return compiled

    def compile_plan(self) -> CompilePlan:
        """Every program that this session can come to need; compiles nothing."""
        (cache,) = (d.used for d in self.resolved.decisions if d.field == "compilation_cache")
        return plan_programs(self.device, self.resolved.ladder.buckets, cache=str(cache))

    def memory_plan(self) -> MemoryPlan:
        """What takes memory, checked against the programs that are compiled."""
        programs = self.device.programs.values()
        return self.resolved.memory.checked({program.name: program.temp_bytes for program in programs})

    def use(self, params: dict) -> None:
        """Computes with these weights from now on; if they are others, no KV of the old ones is found again.

        Weights are the same if every array is the same `jax.Array`, so a dict that was changed in place is noticed,
        too. What a NumPy array holds can change unnoticed, so such weights always count as others.

        Raises:
          ValueError: they are not of the structure, shapes and dtypes that the programs are for; nothing changes.
        """
        weights = jax.tree.leaves(params)
        is_same = len(weights) == len(self.device.weights) and all(map(operator.is_, weights, self.device.weights))
        if not (is_same and all(isinstance(array, jax.Array) for array in weights)):
            self.device.check_params(params)
            # First, so that an interrupt leaves old weights with an old cache.
            self.engine.renew()
        # A list of its own: what its owner puts into their dict takes effect here and nowhere else.
        self.device.weights = weights

    def close(self) -> None:
        """Gives the memory of the store and of the host tier back."""
        self.device.close()


def session_key(config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
    """The config without what a session does not depend on."""
    defaults = ContinuousBatchingConfig()
    per_call = ("seed", "return_logprobs", "use_async_batching", "async_depth", "decode_window", "max_window_latency")
    return replace(config, **{name: getattr(defaults, name) for name in per_call})


def layer_groups_decision(groups: LayerGroups) -> Decision:
    """Which layers share a block table; places of the store that hold no layer are said, since they cost memory."""
    padded = f"{groups.num_padded} of {len(groups.windows) * len(groups.shapes)} places are padding"
    why = padded if groups.num_padded else "layers that see as far back share a block table"
    return Decision(field="layer_groups", asked=None, used=str(groups), why=why)


def attention_of(lm: CausalLM, config: ContinuousBatchingConfig, machine: MachineFacts) -> AttentionChoice:
    """Who attends, for this model on this machine.

    Raises:
      NotImplementedError: what was asked for cannot be.
    """
    place = Place(
        platform=machine.platform,
        capability=machine.capability,
        multiprocessors=machine.multiprocessors,
        block_size=config.block_size,
        dtype=lm.dtype,
        batch_invariant=config.batch_invariant,
    )
    return choose_attention(config.attn_implementation, lm.layers, place)


def model_facts(lm: CausalLM, groups: LayerGroups, block_size: int, attention: Attention) -> ModelFacts:
    """Sizes of a model's cells, weights and temporaries, in bytes.

    The temporaries are estimates: a step keeps a few activations of a token alive at a time, and three float32 images
    of a row of logits (the logits, the sampler's blocks of them, and their exponentials).
    """
    specs = store_spec(groups, num_blocks=1, block_size=block_size, dtype=lm.dtype, attention=attention).arrays
    widest = max(layer.num_heads * layer.head_dim for layer in lm.layers)
    weights = jax.tree.leaves(lm.params)
    return ModelFacts(
        block_bytes_per_token=sum(spec.block_bytes for spec in specs) // block_size,
        token_bytes=32 * widest * 4,
        row_bytes=3 * lm.vocab_size * 4,
        max_positions=lm.max_positions,
        windows=groups.windows,
        weight_bytes=sum(leaf.nbytes for leaf in weights),
        unplaced_weight_bytes=sum(leaf.nbytes for leaf in weights if not isinstance(leaf, jax.Array)),
        layout=layout_factor(specs),
        blocks_per_copy=blocks_per_call(block_size),
        blocks_in_flight=(1 + CALLS_IN_FLIGHT) * blocks_per_call(block_size),
    )


def planned_memory(lm: CausalLM, config: ContinuousBatchingConfig, hints: WorkloadHints) -> MemoryPlan:
    """The memory plan of a session that does not exist, with the memory that is free now."""
    groups = layer_groups(lm.layers, max_positions=lm.max_positions)
    machine = machine_facts()
    attention = attention_of(lm, config, machine).attention
    return resolve(config, hints, machine, model_facts(lm, groups, config.block_size, attention)).memory


def rounded(hints: WorkloadHints) -> WorkloadHints:
    """Hints rounded up, so that calls of about the same size share one session; for one small request if empty."""
    requests = 1
    while requests < hints.num_requests:
        requests *= 8
    return WorkloadHints(
        max_prompt_length=max(128, _power_of_two(hints.max_prompt_length)),
        max_generated_length=max(64, _power_of_two(hints.max_generated_length)),
        num_requests=requests,
    )


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def reachable_buckets(
    resolved: ResolvedConfig, requests: Sequence[WorkloadHints], *, cached: int = 0, forked: int = 0
) -> tuple[Bucket, ...]:
    """Buckets that a job can come to need.

    Args:
      requests: lengths of each request, on its own.
      cached: tokens that the prefix cache has of a single request.
      forked: prompt tokens that are not computed, since another continuation of the prompt computes them.
    """
    ladder, scheduler = resolved.ladder, resolved.scheduler
    if not requests:
        return ()
    if len(requests) == 1:
        prompt, generated = requests[0].max_prompt_length, requests[0].max_generated_length
        chunk = scheduler.chunk_limit(prompt + max(0, generated - 1))
        return ladder.reachable_alone(prompt - cached, generated, chunk)
    prompts = sum(hints.max_prompt_length for hints in requests) - forked
    cells = [hints.max_prompt_length + hints.max_generated_length for hints in requests]
    # What was generated is prefilled again only if somebody can be soft-reset.
    need = held_together(
        [(n, 1) for n in cells],
        windows=scheduler.windows,
        block_size=scheduler.block_size,
        max_batch_tokens=scheduler.max_batch_tokens,
    )
    fits_at_once = need <= scheduler.num_blocks
    rows = min(len(requests), scheduler.max_requests_per_batch)
    return ladder.reachable(num_requests=rows, num_tokens=prompts if fits_at_once else sum(cells))
