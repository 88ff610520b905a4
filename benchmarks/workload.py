"""The work that benchmarks of a model share: random prompts, and waves of requests through one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cbjax.descriptor import Bucket
    from cbjax.engine import Engine
    from cbjax.sampling import SamplingParams


def prompts(count: int, vocab_size: int, *, shortest: int = 16, longest: int = 127) -> list[list[int]]:
    """`count` prompts of `shortest` to `longest` random ids, the same in every run; fewer are the first of more."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Requests that were submitted together and run to their end.

    Attributes:
      steps: bucket and seconds of every step, in order; a step is timed from scheduling to its answers.
      seconds: of the whole wave.
      tokens: generated.
    """

    steps: tuple[tuple[Bucket, float], ...]
    seconds: float
    tokens: int

    def seconds_in(self, kind: str, rows: int = 0) -> list[float]:
        """Of the steps in buckets of a kind ("decode", "mixed"), with so many rows unless 0."""
        return [s for bucket, s in self.steps if bucket.kind == kind and rows in (0, bucket.rows)]


def run_wave(
    engine: Engine, inputs: Sequence[Sequence[int]], new_tokens: int, sampling: Sequence[SamplingParams]
) -> Wave:
    """Runs the requests with nothing else in the engine; each ends after `new_tokens` tokens."""
    start = time.perf_counter()
    requests = [
        engine.submit(f"r{i}", ids, max_new_tokens=new_tokens, eos_token_ids=(), sampling=params)
        for i, (ids, params) in enumerate(zip(inputs, sampling, strict=True))
    ]
    steps = []
    while not engine.is_idle:
        before, begun = engine.stats.steps.copy(), time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        steps += [(bucket, seconds) for bucket in (engine.stats.steps - before)]
    wave = Wave(
        steps=tuple(steps),
        seconds=time.perf_counter() - start,
        tokens=sum(len(request.generated_tokens) for request in requests),
    )
    if wave.tokens != new_tokens * len(inputs):
        raise RuntimeError(f"{len(inputs)} requests came to {wave.tokens} tokens instead of {new_tokens} each")
    return wave
