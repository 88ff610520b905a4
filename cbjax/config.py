"""What users ask for: batching settings, generation settings, and hints about the workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cbjax.ladder import MIN_DECODE_ROWS
from cbjax.sampling.params import SamplingParams, derive_seed
from cbjax.scheduler import MAX_WINDOW, MIN_BLOCK_SIZE, eviction_named, scheduler_named
from cbjax.strict import check_bool, check_fraction, check_int, check_number, rejects_unknown_fields, set_checked_ints

_BOOLS = ("allow_block_sharing", "return_logprobs", "per_request_processors", "batch_invariant", "compilation_cache")
# Each is a request of its own from the start, so a slip of the keyboard would take minutes to be seen.
MAX_CONTINUATIONS = 10_000
MAX_COMPILE_LEVEL = 3

# Steps in flight; what the scheduler's rules were proved for.
MAX_ASYNC_DEPTH = 3

# Attention implementations, and what transformers puts before the names of its own.
ATTENTIONS = ("pallas", "xla", "eager")
_PAGED = "paged|"

# Fields that exist for compatibility or are to come: the values that ask for nothing this version cannot do.
_WITHOUT_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "use_cuda_graph": ((None, False), "every step is one compiled program already"),
    "max_queue_size": ((0,), "requests are handed to the engine directly in this version"),
}


@rejects_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """How requests are batched. None means: decided at start, and told by `ResolvedConfig.report()`.

    Attributes:
      block_size: tokens of a KV block, the unit of allocation; at least 4.
      num_blocks: blocks of the pool. None: what the workload can need, at most what fits into memory.
      max_batch_tokens: tokens computed in one step. None: 8192, on CPU 512, less if memory is short.
      max_memory_percent: fraction of free memory the engine may take. None: 0.9, on CPU 0.6.
      max_requests_per_batch: rows of one step. None: 1024, on CPU 64, at most `max_batch_tokens` and `num_blocks`.
      max_blocks_per_request: columns of the block table. None: from the workload, else what 8192 tokens need. 0: the
        same, and without the decode programs (every step runs as a mixed one).
      allow_block_sharing: prefix caching: prompts that begin alike share the full blocks of what they have in common,
        and blocks that nobody holds any more are found again as long as there is room.
      eviction_policy: which of these go first when there is none: "arc", those used only once before those used again,
        within a share that adapts; "lru", those not used for longest; "lifo", those given up last (docs/eviction.md).
      cpu_offload_space: GiB of host memory that keep the KV blocks of requests which lose theirs, so that these come
        back instead of being computed again. 0: none.
      cpu_offload_space_safety_threshold: fraction of the available main memory that these take at most, above 0.
      use_async_batching: plan and dispatch steps before the answers of those before them are read, so that the device
        need not wait for the host. Tokens are the same; requests that end by an EOS id run a few rows in vain. None:
        where it helps.
      async_depth: steps in flight while the next one is planned, 1 to 3. None: 1.
      decode_window: decode steps of one dispatch, 1 (none but one) to 16. While no request waits or is being prefilled,
        the device goes on for as many without the host. None: 8, on CPU 1.
      max_window_latency: seconds that such a window may take where requests can come and tokens are followed (a
        manager, `stream`), by the time of the steps before: so much later a token is seen, a new request begins or a
        cancelled one makes room.
      use_cuda_graph, max_queue_size: no effect in this version; values that would ask for something are refused.
      default_compile_level: how many programs there are. 1: fewest, with most padding; 2: sizes double from one to the
        next; 3: most programs, least padding. 0: as decided at start.
      decode_buckets, mixed_buckets: rows of the decode programs and tokens of the mixed ones, in ascending order, in
        place of what the level says; a last one as large as the budget is added. None: by the level.
      scheduler_type: "fifo" or "prefill_first".
      safety_margin: fraction of the pool below which waiting requests are held back. None: 0.15 for fifo, 0.0 for
        prefill_first.
      attn_implementation: "pallas" (kernels for TPUs, and for Hopper GPUs in bfloat16), "xla" (portable) or "eager" (a
        token at a time, to compare with); also with transformers' "paged|" before it. None: what suits the device.
      return_logprobs: log-probability of each generated token.
      per_request_processors: sampling settings per request; always possible here, so both values are accepted.
      seed: of requests that have none of their own. None: drawn anew for each call.
      batch_invariant: a request's tokens and logprobs have the same bits whatever happens around it: batch mates,
        chunks, cached prefixes, forks, KV offloaded or computed again. Every program is compiled and compared at the
        first call; one that differs is not used.
      compilation_cache: keep compiled programs on disk between processes.

    Raises:
      TypeError, ValueError: a field that does not exist, or a value outside its range.
    """

    block_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    eviction_policy: str = "arc"
    use_async_batching: bool | None = None
    async_depth: int | None = None
    decode_window: int | None = None
    max_window_latency: float = 0.05
    use_cuda_graph: bool | None = None
    default_compile_level: int = 0
    decode_buckets: Sequence[int] | None = None
    mixed_buckets: Sequence[int] | None = None
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    cpu_offload_space: float = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    attn_implementation: str | None = None
    return_logprobs: bool = False
    per_request_processors: bool = False
    max_queue_size: int = 0
    seed: int | None = None
    batch_invariant: bool = False
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        set_checked_ints(self, ("block_size",), minimum=0)
        if self.block_size < MIN_BLOCK_SIZE:
            raise ValueError(f"block_size must be at least {MIN_BLOCK_SIZE} tokens; got {self.block_size}")
        set_checked_ints(self, ("num_blocks", "max_batch_tokens", "max_requests_per_batch"), minimum=1, none=True)
        set_checked_ints(self, ("max_blocks_per_request", "seed"), minimum=0, none=True)
        check_bool("use_async_batching", self.use_async_batching, none=True)
        set_checked_ints(self, ("async_depth",), minimum=1, none=True)
        set_checked_ints(self, ("decode_window",), minimum=1, none=True)
        check_number("max_window_latency", self.max_window_latency, minimum=0)
        if self.decode_window is not None and self.decode_window > MAX_WINDOW:
            raise ValueError(
                f"decode_window must be at most {MAX_WINDOW} steps; got {self.decode_window}: the host's part is small "
                "by then"
            )
        if self.async_depth is not None and self.async_depth > MAX_ASYNC_DEPTH:
            raise ValueError(
                f"async_depth must be at most {MAX_ASYNC_DEPTH}; got {self.async_depth}: more steps in flight hide no "
                "more of the host's work, and every one is run in vain when a request ends by an EOS id"
            )
        if self.async_depth is not None and self.use_async_batching is False:
            raise ValueError(
                f"async_depth={self.async_depth} asks for steps in flight and use_async_batching=False for none: drop "
                "one or the other"
            )
        check_fraction("max_memory_percent", self.max_memory_percent, none=True)
        check_fraction("safety_margin", self.safety_margin, none=True)
        check_number("cpu_offload_space", self.cpu_offload_space, minimum=0)
        check_fraction("cpu_offload_space_safety_threshold", self.cpu_offload_space_safety_threshold)
        if not self.cpu_offload_space_safety_threshold:
            raise ValueError(
                "cpu_offload_space_safety_threshold must be above 0; got 0: to keep no blocks in host memory, "
                "leave cpu_offload_space at 0"
            )
        for name in _BOOLS:
            check_bool(name, getattr(self, name))
        scheduler_named(self.scheduler_type)
        eviction_named(self.eviction_policy)
        self._check_attention()
        set_checked_ints(self, ("default_compile_level",), minimum=0)
        if self.default_compile_level > MAX_COMPILE_LEVEL:
            raise ValueError(
                f"default_compile_level must be at most {MAX_COMPILE_LEVEL}; got {self.default_compile_level}: for "
                "other sizes give decode_buckets and mixed_buckets"
            )
        self._check_rungs("decode_buckets", MIN_DECODE_ROWS, "max_requests_per_batch")
        self._check_rungs("mixed_buckets", 1, "max_batch_tokens")
        if self.decode_buckets is not None and self.max_blocks_per_request == 0:
            raise ValueError("decode_buckets asks for decode programs and max_blocks_per_request=0 for none: drop one")
        for name, (accepted, why) in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if not any(value is ok or (type(value) is type(ok) and value == ok) for ok in accepted):
                raise ValueError(f"{name}={value!r} has no effect yet: {why}; leave it at {accepted[0]!r}")

    def _check_attention(self) -> None:
        """Takes transformers' prefix off the name, and checks it."""
        given = self.attn_implementation
        if given is None:
            return
        bare = given.removeprefix(_PAGED) if isinstance(given, str) else given
        if bare not in ATTENTIONS:
            raise ValueError(
                f"attn_implementation must be one of {', '.join(ATTENTIONS)} (with {_PAGED!r} before it or not), or "
                f"None for what suits the device; got {given!r}"
            )
        object.__setattr__(self, "attn_implementation", bare)

    def _check_rungs(self, name: str, minimum: int, budget_name: str) -> None:
        """Replaces the field by a tuple of ints that ascend from `minimum` to the budget, if there is one."""
        given = getattr(self, name)
        if given is None:
            return
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise TypeError(f"{name} must be a sequence of ints or None; got {given!r}")
        rungs = tuple(check_int(f"{name}[{i}]", rung, minimum=minimum) or minimum for i, rung in enumerate(given))
        if not rungs:
            raise ValueError(f"{name} must have at least one size; got none: leave it at None for the default ones")
        if any(low >= high for low, high in pairwise(rungs)):
            raise ValueError(f"{name} must be in ascending order, each size once; got {rungs}: sort them")
        budget = getattr(self, budget_name)
        if budget is not None and rungs[-1] > budget:
            raise ValueError(
                f"{name} must not go above {budget_name}={budget}; got {rungs}: no step is larger than that, so drop "
                f"{rungs[-1]} or raise {budget_name}"
            )
        object.__setattr__(self, name, rungs)


@rejects_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How one request is generated.

    Attributes:
      max_new_tokens: output tokens at most, at least 1. None: up to the model's last position or the pool's end.
      do_sample: draw from the distribution instead of taking the largest logit. None: True if a temperature above 0,
        a top_k or a top_p is given.
      temperature: divides the logits; 0 means greedy. None: 1.0.
      top_k: keep the k largest logits; None, 0 and -1 mean all.
      top_p: keep the smallest set of the largest probabilities whose mass reaches this, in (0, 1]. None: all.
      seed: the request's tokens depend on it, the prompt, these settings and the weights only. None: derived from
        `ContinuousBatchingConfig.seed` and the request's place in the call.
      num_return_sequences: continuations of the prompt, each an output of its own and sampled under a seed of its own,
        which follows from the request's; the prompt is computed once. From 1 to 10,000.
      eos_token_id: ids that end the request. None: the model's own; -1 (or an empty sequence): none.

    Raises:
      TypeError, ValueError: a field that does not exist, or a value outside its range.
    """

    max_new_tokens: int | None = 20
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        set_checked_ints(self, ("max_new_tokens",), minimum=1, none=True)
        set_checked_ints(self, ("seed",), minimum=0, none=True)
        set_checked_ints(self, ("num_return_sequences",), minimum=1)
        check_bool("do_sample", self.do_sample, none=True)
        self.eos_token_ids(())
        if self.do_sample is False and self.asks_to_sample:
            raise ValueError(
                "do_sample=False takes the largest logit and leaves temperature, top_k and top_p without effect; got "
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: drop one or the other"
            )
        if self.num_return_sequences > MAX_CONTINUATIONS:
            raise ValueError(
                f"num_return_sequences must be at most {MAX_CONTINUATIONS}; got {self.num_return_sequences}: "
                "give the prompt several times, with a seed each"
            )
        if self.num_return_sequences > 1 and not self.samples:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} greedy continuations of a prompt are all the same: "
                "set a temperature, top_k or top_p (or do_sample=True), or leave it at 1"
            )
        self.sampling(seed=0, logprobs=False)

    @property
    def asks_to_sample(self) -> bool:
        """Whether a setting only makes sense for a sampled request."""
        return bool(self.temperature) or self.top_k not in (None, 0, -1) or self.top_p not in (None, 1, 1.0)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, not taken by the largest logit."""
        return self.asks_to_sample if self.do_sample is None else self.do_sample

    def sampling(self, *, seed: int, logprobs: bool, continuation: int = 0) -> SamplingParams:
        """The sampler's settings; `seed` is used if the config has none. Each continuation has a seed of its own."""
        seed = seed if self.seed is None else self.seed
        return SamplingParams(
            do_sample=self.samples,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=derive_seed(seed, continuation) if continuation else seed,
            logprobs=logprobs,
        )

    def eos_token_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that end the request; negative ones mean none and are dropped.

        Raises:
          TypeError: not ints.
        """
        if self.eos_token_id is None:
            return default
        given = self.eos_token_id
        ids = getattr(given, "tolist", lambda: given)()  # of an array, too
        ids = ids if isinstance(ids, Sequence) else (ids,)
        if isinstance(ids, str | bytes) or any(isinstance(i, bool) or not hasattr(i, "__index__") for i in ids):
            raise TypeError(f"eos_token_id must be an int, a sequence of ints or None; got {self.eos_token_id!r}")
        return tuple(sorted({int(i) for i in ids if i >= 0}))


@rejects_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadHints:
    """What is to come, as far as it is known; 0 where it is not. Lengths in tokens."""

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        set_checked_ints(self, ("max_prompt_length", "max_generated_length", "num_requests"), minimum=0)
