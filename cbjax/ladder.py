"""The ladder: every bucket a step can be padded to, and with it every program that can ever be compiled.

There are no buckets by context length: attention loops over fixed chunks with a dynamic trip count. Decode buckets go
by rows (2, 8, 16, 32, ...; at least 2, since matrix products of one row take other paths), mixed ones by tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cbjax.scheduler import Batch, Bucket

MIN_DECODE_ROWS = 2
MIN_MIXED_TOKENS = 64


class Density(enum.Enum):
    """How far apart rungs are: fewer programs with more padding, or more programs with less."""

    COARSE = "each four times the one before: fewest programs, most padding"
    DOUBLING = "each twice the one before"
    FINE = "each twice the one before, and one halfway: most programs, least padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Buckets in ascending order; the last of each kind holds the largest step the budgets allow.

    Attributes:
      max_batch_tokens: the token budget; the smallest mixed bucket can be larger.
    """

    max_batch_tokens: int
    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    def select(self, batch: Batch) -> Bucket:
        """The smallest bucket that fits; decode programs first, since they are cheaper."""
        for bucket in self.buckets:
            if bucket.fits(batch):
                return bucket
        raise ValueError(f"{batch.num_rows} rows with {batch.num_tokens} tokens fit no bucket of the ladder")

    def windows(self, max_window: int, rows: int) -> int:
        """Steps of a window at most, if as many rows run: 1 where no decode program takes them all."""
        return max_window if self.decode and rows <= self.decode[-1].rows else 1

    def only(self, kept: Container[Bucket]) -> Ladder:
        """The ladder without the buckets that are not in `kept`: what they held takes the next larger one."""
        decode, mixed = (tuple(b for b in buckets if b in kept) for buckets in (self.decode, self.mixed))
        return replace(self, decode=decode, mixed=mixed)

    def reachable(self, *, num_requests: int, num_tokens: int) -> tuple[Bucket, ...]:
        """Buckets that a job of `num_requests` requests can come to need.

        Args:
          num_requests: requests that exist at one time, at most.
          num_tokens: tokens that all of them together can put into one step.
        """
        return _up_to(self.decode, "rows", num_requests) + _up_to(self.mixed, "tokens", num_tokens)

    def reachable_alone(self, prompt_tokens: int, new_tokens: int, chunk: int | None = None) -> tuple[Bucket, ...]:
        """Buckets that one request needs: for whole chunks of its prompt, for their rest, and for decodes.

        Args:
          chunk: tokens of one step at most, where that is less than the budget.
        """
        chunk = chunk or self.max_batch_tokens
        chunks = {min(prompt_tokens, chunk), prompt_tokens % chunk} - {0}
        if new_tokens > 1:
            chunks.add(1)
        ones, several = self.decode or self.mixed, self.mixed
        return tuple(sorted({next(b for b in (ones if n == 1 else several) if b.tokens >= n) for n in chunks}))


def make_ladder(
    *,
    max_batch_tokens: int,
    max_rows: int,
    decode: bool = True,
    density: Density = Density.DOUBLING,
    decode_rungs: Sequence[int] | None = None,
    mixed_rungs: Sequence[int] | None = None,
) -> Ladder:
    """The ladder of these budgets (tokens, rows); without `decode` every step runs in a mixed bucket.

    Args:
      density: how far apart rungs are that are not given.
      decode_rungs, mixed_rungs: rows of the decode buckets and tokens of the mixed ones, ascending; those from the
        budget on are replaced by the budget itself.
    """
    last_rows, last_tokens = max(max_rows, MIN_DECODE_ROWS), max(max_batch_tokens, MIN_MIXED_TOKENS)
    if decode_rungs is None:
        rows = _rungs((MIN_DECODE_ROWS, 8), last_rows, density)
    else:
        rows = [*(rung for rung in decode_rungs if rung < last_rows), last_rows]
    if mixed_rungs is None:
        tokens = _rungs((MIN_MIXED_TOKENS,), last_tokens, density)
    else:
        tokens = [*(rung for rung in mixed_rungs if rung < max_batch_tokens), max_batch_tokens]
    return Ladder(
        max_batch_tokens=max_batch_tokens,
        decode=tuple(Bucket(kind="decode", tokens=r, rows=r) for r in rows if decode),
        mixed=tuple(Bucket(kind="mixed", tokens=t, rows=min(t, rows[-1])) for t in tokens),
    )


def _rungs(first: tuple[int, ...], last: int, density: Density) -> list[int]:
    """`first`, then as the density says, up to and including `last`."""
    rungs = [rung for rung in first if rung < last]
    factor = 4 if density is Density.COARSE else 2
    while rungs and rungs[-1] * factor < last and rungs[-1] >= first[-1]:
        rungs.append(rungs[-1] * factor)
    rungs.append(last)
    if density is Density.FINE:
        halfway = [(low + high) // 2 for low, high in pairwise(rungs) if high - low > 1]
        rungs = sorted({*rungs, *halfway})
    return rungs


def _up_to(buckets: tuple[Bucket, ...], field: str, wanted: int) -> tuple[Bucket, ...]:
    enough = [i for i, bucket in enumerate(buckets) if getattr(bucket, field) >= wanted]
    return buckets[: enough[0] + 1] if enough else buckets
