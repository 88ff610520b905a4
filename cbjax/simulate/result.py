"""What a simulation came to: one value with a readable form."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbjax.scheduler import Bucket
from cbjax.simulate.statistics import Histogram, Timeline

QUANTILES = (0.5, 0.9, 0.99)
FORMAT = "cbjax.simulate.Result/1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """Counts in requests, tokens, steps, blocks; times in simulated seconds.

    Attributes:
      trace: its name.
      policy, eviction: names; `eviction` is None if no block is shared.
      num_blocks, block_size, safety_margin, host_blocks: the pool.
      requests, refused, admitted, completed: of the trace; those that can never fit; those that got a place once;
        those that have all their tokens.
      seconds: from the start of the clock to the last token.
      steps: by bucket.
      prompt_tokens, cached_tokens: of requests when they were first admitted; those of them found in the prefix cache.
      computed_tokens, generated_tokens: put through the model; sampled.
      recomputed_tokens: whose KV was dropped by a soft reset and not found again.
      restored_tokens: whose KV came back from host memory.
      soft_resets, offloads: times that a request lost its blocks: its KV dropped, or kept in host memory.
      first_eviction: number of the first step, from 0, in which a request lost its blocks; None: never.
      offloaded_blocks, restored_blocks, copied_blocks: moved to host memory, back, and copied for forks.
      cache_evictions: blocks taken from the prefix cache for something else.
      starved: times that a running request got no block in a step.
      peak_rows, peak_blocks: most rows in a step, most blocks held at one time.
      waiting, first_token, latency: f64[requests], from arrival to first admission, first token, last token; NaN where
        there is none.
      inter_token: between tokens of a request.
      timeline: the pool and the line over time.
    """

    trace: str
    policy: str
    eviction: str | None
    num_blocks: int
    block_size: int
    safety_margin: float
    host_blocks: int
    requests: int
    refused: int
    admitted: int
    completed: int
    seconds: float
    steps: Mapping[Bucket, int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    restored_tokens: int
    soft_resets: int
    offloads: int
    first_eviction: int | None
    offloaded_blocks: int
    restored_blocks: int
    copied_blocks: int
    cache_evictions: int
    starved: int
    peak_rows: int
    peak_blocks: int
    waiting: np.ndarray
    first_token: np.ndarray
    latency: np.ndarray
    inter_token: Histogram
    timeline: Timeline

    @property
    def num_steps(self) -> int:
        """Steps of any kind."""
        return sum(self.steps.values())

    @property
    def hit_rate(self) -> float:
        """Fraction of prompt tokens found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def evictions(self) -> int:
        """Times that a request lost its blocks, one way or the other."""
        return self.soft_resets + self.offloads

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per simulated second."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def quantiles(self) -> dict[str, list[float]]:
        """Seconds at `QUANTILES` of each kind of time; NaN where there are none."""
        times = {"waiting": self.waiting, "first_token": self.first_token, "latency": self.latency}
        found = {name: _quantiles(values[~np.isnan(values)]) for name, values in times.items()}
        return found | {"inter_token": self.inter_token.quantiles(QUANTILES)}

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        kinds: Counter[str] = Counter()
        for bucket, count in self.steps.items():
            kinds[bucket.kind] += count
        settings = [f"{self.num_blocks:,} blocks of {self.block_size}", f"margin {self.safety_margin:g}", self.policy]
        settings += [f"{self.host_blocks:,} host blocks"] * bool(self.host_blocks)
        requests = f"{self.completed:,} of {self.requests:,} completed"
        requests += f", {self.refused:,} refused (larger than the pool)" * bool(self.refused)
        cache = "off"
        if self.eviction is not None:
            cache = (
                f"{self.hit_rate:.1%} of prompt tokens found ({self.cached_tokens:,}), "
                f"{self.cache_evictions:,} blocks given up ({self.eviction})"
            )
        return [
            ("trace", self.trace),
            ("pool", ", ".join(settings)),
            ("requests", requests),
            ("tokens", f"{self.prompt_tokens:,} prompt, {self.generated_tokens:,} generated"),
            ("speed", f"{self.tokens_per_second:,.1f} generated tokens/s over {self.seconds:,.1f} simulated s"),
            *((name.replace("_", " "), _times(values)) for name, values in self.quantiles().items()),
            ("steps", ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())) or "none"),
            ("blocks", f"{self.peak_blocks:,} of {self.num_blocks:,} used at most"),
            ("prefix cache", cache),
            ("KV pressure", self._pressure()),
        ]

    def _pressure(self) -> str:
        parts = []
        if self.soft_resets:
            parts.append(f"{self.soft_resets:,} soft resets, {self.recomputed_tokens:,} tokens computed again")
        if self.offloads:
            parts.append(
                f"{self.offloads:,} offloads, {self.offloaded_blocks:,} blocks out and {self.restored_blocks:,} back"
            )
        if self.first_eviction is not None:
            parts.append(f"the first in step {self.first_eviction:,}")
        if self.starved:
            parts.append(f"{self.starved:,} times a request had to stand still for a step")
        return "; ".join(parts) or "none"

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single requests' times, as plain values; times as quantiles, NaN as None."""
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("steps", "waiting", "first_token", "latency", "inter_token", "timeline")
        }
        times = {name: dict(map(_named, QUANTILES, values)) for name, values in self.quantiles().items()}
        timeline = {name: getattr(self.timeline, name).tolist() for name in self.timeline.__dataclass_fields__}
        steps = {str(bucket): count for bucket, count in sorted(self.steps.items())}
        derived = {name: getattr(self, name) for name in ("num_steps", "hit_rate", "evictions", "tokens_per_second")}
        return {"format": FORMAT, **plain, **derived, "steps": steps, "times": times, "timeline": timeline}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)


def _quantiles(values: np.ndarray) -> list[float]:
    return np.quantile(values, QUANTILES).tolist() if len(values) else [math.nan] * len(QUANTILES)


def _named(at: float, value: float) -> tuple[str, float | None]:
    return f"p{100 * at:g}", None if math.isnan(value) else value


def _times(values: list[float]) -> str:
    if math.isnan(values[0]):
        return "-"
    return ", ".join(f"{_short(value)} {name}" for value, name in zip(values, ("median", "p90", "p99"), strict=True))


def _short(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
