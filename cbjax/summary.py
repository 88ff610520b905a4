"""What a run came to, for people: one value with a readable form."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cbjax.accounting import EngineStats
from cbjax.descriptor import Bucket
from cbjax.programs import Program
from cbjax.requests import GenerationOutput, RequestStatus
from cbjax.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Counts in requests, tokens, steps, blocks; times in seconds.

    Attributes:
      requests: by how they ended.
      prompt_tokens: of requests that ran; of several continuations of a prompt once.
      seconds: from the first submission to the last end, warm-up not counted.
      first_token: median and maximum of the times to first token; None if no token came.
      steps: dispatches by bucket kind.
      windows: those of several decode steps, by their number of steps.
      compiled, compile_seconds, programs: how many were compiled for this call, the time that took, their names.
      peak_blocks, num_blocks: most held at one time, and the pool.
      cached_tokens: prompt tokens found in the prefix cache.
      why_uncached: why none could be found, if that is so.
      soft_resets, recomputed_tokens: what pressure cost.
      offloads, copied_bytes: evictions whose KV went to host memory instead; bytes copied there and back.
    """

    requests: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    first_token: tuple[float, float] | None
    steps: dict[str, int]
    windows: dict[int, int]
    compiled: int
    compile_seconds: float
    programs: tuple[str, ...]
    peak_blocks: int
    num_blocks: int
    cached_tokens: int
    why_uncached: str | None
    soft_resets: int
    recomputed_tokens: int
    offloads: int
    copied_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        first = "-"
        if self.first_token:
            first = f"{self.first_token[0]:.2f} s median, {self.first_token[1]:.2f} s at most"
        compiled = f"{self.compiled} in {self.compile_seconds:.1f} s: {', '.join(self.programs)}"
        pressure = [f"{self.soft_resets} soft resets, {self.recomputed_tokens} tokens computed again"] * (
            self.soft_resets > 0
        )
        if self.offloads:
            pressure.append(f"{self.offloads} offloads, {self.copied_bytes / 2**20:.1f} MiB copied")
        why = self.why_uncached or ""
        steps = ", ".join(f"{count} {kind}" for kind, count in self.steps.items()) or "none"
        if self.windows:
            steps += f" (windows: {', '.join(f'{count} of {size} steps' for size, count in self.windows.items())})"
        return [
            ("requests", ", ".join(f"{count} {name}" for name, count in self.requests.items()) or "none"),
            ("tokens", f"{self.prompt_tokens} prompt, {self.generated_tokens} generated"),
            ("speed", f"{self.tokens_per_second:.1f} generated tokens/s over {self.seconds:.2f} s"),
            ("first token", first),
            ("steps", steps),
            ("programs compiled", compiled if self.compiled else "0"),
            ("blocks", f"{self.peak_blocks} of {self.num_blocks} used at most"),
            ("prefix cache", f"{self.cached_tokens} prompt tokens found" + (why and f": {why}")),
            ("KV pressure", "; ".join(pressure) or "none"),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


def summarize(
    outputs: Iterable[GenerationOutput],
    stats: EngineStats,
    programs: Iterable[Program],
    *,
    seconds: float,
    scheduler: SchedulerConfig,
    block_bytes: int,
    warmup_seconds: float = 0.0,
) -> RunSummary:
    """The summary of one call, from what it returned and the engine's counts over it; `block_bytes` of one KV block."""
    outputs, programs = list(outputs), list(programs)
    first = [output.timestamps[0] for output in outputs if output.timestamps]
    kinds: Counter[str] = Counter()
    for bucket, count in stats.steps.items():
        assert isinstance(bucket, Bucket)
        kinds[bucket.kind] += count
    return RunSummary(
        requests=dict(Counter(RequestStatus(output.status).name.lower() for output in outputs)),
        prompt_tokens=sum(len(o.prompt_ids) for o in outputs if o.lifespan[0] >= 0 and not o.continuation),
        generated_tokens=sum(len(output.generated_tokens) for output in outputs),
        seconds=seconds,
        first_token=(statistics.median(first), max(first)) if first else None,
        steps=dict(kinds),
        windows=dict(sorted(stats.windows.items())),
        compiled=len(programs),
        compile_seconds=warmup_seconds or sum(program.seconds for program in programs),
        programs=tuple(program.name for program in programs),
        peak_blocks=stats.peak_blocks,
        num_blocks=scheduler.num_blocks,
        cached_tokens=stats.cached_tokens,
        why_uncached=_why_uncached(outputs, scheduler),
        soft_resets=stats.soft_resets,
        recomputed_tokens=stats.recomputed_tokens,
        offloads=stats.offloads,
        copied_bytes=(stats.offloaded_blocks + stats.restored_blocks) * block_bytes,
    )


def _why_uncached(outputs: Iterable[GenerationOutput], scheduler: SchedulerConfig) -> str | None:
    """Why no prompt can ever be found, if that is so."""
    if not scheduler.shares_blocks:
        return "allow_block_sharing is off"
    longest = max((len(output.prompt_ids) for output in outputs), default=0)
    if longest <= scheduler.block_size:
        return f"no prompt is longer than a block ({longest} of {scheduler.block_size} tokens)"
    return None
