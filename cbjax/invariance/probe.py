"""What programs are shown to compare their bits: one sequence, in rows of any length and order, among batch mates.

All rows of a step write their keys and values before any row reads, so a sequence can be cut at will and all its pieces
computed in one step, in any order: each must give the bits that the whole gives. A decode program takes one token of it
per row. Everything follows from the settings; nothing is random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cbjax.descriptor import Bucket
from cbjax.sampling import SamplingParams
from cbjax.scheduler import NUM_EOS_IDS, Batch, SchedulerConfig, blocks_for

# Tokens of the sequence: more than one chunk of attention, and of its tiles.
LENGTH = 192
_MATE_LENGTH = 256
_MAX_QUERIES = 32
# Every path of the sampler: greedy, none of the filters, filters that its candidates decide, and those they do not.
_SETTINGS = (
    SamplingParams(logprobs=True),
    SamplingParams(do_sample=True, seed=1, logprobs=True),
    SamplingParams(do_sample=True, temperature=0.7, top_p=0.9, seed=2, logprobs=True),
    SamplingParams(do_sample=True, top_k=20, seed=3, logprobs=True),
    SamplingParams(do_sample=True, temperature=1.5, top_k=200, top_p=0.95, seed=4, logprobs=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One row: `count` tokens from `start` on, of the sequence or of the mates'.

    Attributes:
      query: which of the probe's queries the last token answers; None: no answer is compared.
    """

    start: int
    count: int
    query: int | None = None
    is_mate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Attributes:
    tokens, mates: i32[tokens], the sequence, and what its batch mates are pieces of (maybe none).
    table: i32[groups, slots + 1, max_blocks], whose slot 0 is the sequence's and slot 1 the mates'.
    blocks: i32[groups, blocks] of the sequence.
    queries: positions whose outputs are compared, in ascending order; the last token's among them.
    """

    tokens: np.ndarray
    mates: np.ndarray
    table: np.ndarray
    blocks: np.ndarray
    queries: tuple[int, ...]

    def batch(self, pieces: Sequence[Piece], *, quiet_mates: bool) -> Batch:
        """The rows of one step; mates ask as much of the sampler as the sequence does, or if quiet nothing."""
        rows = len(pieces)
        parts = [(self.mates if p.is_mate else self.tokens)[p.start : p.start + p.count] for p in pieces]
        asked = [i % len(_SETTINGS) if p.is_mate else (p.query or 0) % len(_SETTINGS) for i, p in enumerate(pieces)]
        words = np.stack([_SETTINGS[i].pack() for i in asked], axis=1)
        words[:, [p.is_mate and quiet_mates for p in pieces]] = 0
        emits = np.array([p.is_mate or p.query is not None for p in pieces])
        return Batch(
            uid=np.zeros(rows, np.int32),
            incarnation=np.zeros(rows, np.int32),
            slot=np.array([p.is_mate for p in pieces], np.int32),
            start=np.array([p.start for p in pieces], np.int32),
            count=np.array([p.count for p in pieces], np.int32),
            carried=np.zeros(rows, np.bool_),
            emits=emits,
            output_index=np.array([p.query or 0 for p in pieces], np.int32),
            draws=emits.astype(np.int32),
            eos=np.full((NUM_EOS_IDS, rows), -1, np.int32),
            words=words,
            tokens=np.concatenate(parts),
        )

    def token_of(self, query: int) -> Piece:
        """A query's token alone."""
        return Piece(start=self.queries[query], count=1, query=query)

    def piece(self, start: int, end: int) -> Piece:
        """Tokens `start` to `end`."""
        query = self.queries.index(end - 1) if end - 1 in self.queries else None
        return Piece(start=start, count=end - start, query=query)


def make_probe(config: SchedulerConfig, reference: Bucket, *, vocab_size: int, max_positions: int) -> Probe:
    """The probe for a pool and its largest mixed bucket.

    Raises:
      ValueError: the pool has less than a block per layer group.
    """
    groups, size = config.num_groups, config.block_size
    per_group = config.num_blocks // groups
    if not per_group:
        raise ValueError(f"num_blocks={config.num_blocks} is less than one block for each of {groups} layer groups")
    longest = min(max_positions, config.max_blocks_per_request * size)
    held = min(blocks_for(min(LENGTH, longest), size), max(1, per_group * 2 // 3))
    # The mates have what is left, and a slot of their own.
    left = per_group - held if config.max_requests_per_batch > 1 else 0
    held_by_mates = min(blocks_for(min(_MATE_LENGTH, longest), size), left)
    shape = (groups, config.max_requests_per_batch + 1, config.max_blocks_per_request)
    table = np.full(shape, config.num_blocks, np.int32)
    ids = np.arange(groups * per_group, dtype=np.int32).reshape(groups, per_group)
    table[:, 0, :held] = ids[:, :held]
    table[:, 1, :held_by_mates] = ids[:, held : held + held_by_mates]
    length, mate_length = min(LENGTH, longest, held * size), min(_MATE_LENGTH, longest, held_by_mates * size)
    rng = np.random.default_rng(0)
    count = min(_MAX_QUERIES, length, 2 * (reference.rows - 1))
    return Probe(
        tokens=rng.integers(0, vocab_size, length, dtype=np.int32),
        mates=rng.integers(0, vocab_size, mate_length, dtype=np.int32),
        table=table,
        blocks=ids[:, :held],
        queries=tuple(sorted({length - 1 - i * length // count for i in range(count)})),
    )


def whole(probe: Probe, bucket: Bucket) -> Iterator[list[Piece]]:
    """Steps of a mixed bucket that compute every cell in long chunks, and every query's token once more on its own."""
    first = end = 0
    queries: list[int] = []
    while first < len(probe.tokens):
        asks = end in probe.queries
        is_full = end - first + len(queries) + 1 + asks > bucket.tokens or len(queries) + asks >= bucket.rows
        if end == len(probe.tokens) or is_full:
            # The last token's own row answers for it.
            yield [Piece(start=first, count=end - first), *map(probe.token_of, queries)]
            first, queries = end, []
            continue
        if asks:
            queries.append(probe.queries.index(end))
        end += 1


def arrangements(probe: Probe, bucket: Bucket) -> list[list[Piece]]:
    """Steps of a bucket that must give the bits of `whole`."""
    rng = random.Random(bucket.tokens)
    if bucket.kind == "decode":
        return _decode_arrangements(probe, bucket.rows, rng)
    return [_one_chunk(probe, bucket), _many_chunks(probe, bucket, rng)]


def _decode_arrangements(probe: Probe, rows: int, rng: random.Random) -> list[list[Piece]]:
    queries = rng.sample(range(len(probe.queries)), len(probe.queries))
    full = [[probe.token_of(queries[(first + i) % len(queries)]) for i in range(rows)] for first in range(0, 8, rows)]
    mates = [_mate(len(probe.mates) - 1 - i, 1) for i in range(min(rows - 1, 5, len(probe.mates)))]
    few = [*mates[1:], *map(probe.token_of, queries[: rows - len(mates)][:2]), *mates[:1]]
    return [*full, few]


def _one_chunk(probe: Probe, bucket: Bucket) -> list[Piece]:
    """As much of the sequence's end as fits, behind a mate's chunk."""
    mates = min(len(probe.mates), bucket.tokens // 4)
    count = min(len(probe.tokens), bucket.tokens - mates)
    return [_mate(0, mates)] * (mates > 0) + [probe.piece(len(probe.tokens) - count, len(probe.tokens))]


def _many_chunks(probe: Probe, bucket: Bucket, rng: random.Random) -> list[Piece]:
    """The same in many pieces, out of order, between mates of one token."""
    mates = min(len(probe.mates), bucket.rows // 4, 8)
    end = len(probe.tokens)
    start = max(0, end - (bucket.tokens - mates))
    # Before and behind a query's token, so that some pieces are single tokens.
    ends = sorted({p + more for p in probe.queries for more in (0, 1)} & set(range(start + 1, end)))
    cuts = sorted(rng.sample(ends, min(len(ends), bucket.rows - mates - 1)))
    pieces = [probe.piece(a, b) for a, b in zip([start, *cuts], [*cuts, end], strict=True)]
    pieces += [_mate(len(probe.mates) - 1 - i, 1) for i in range(mates)]
    return rng.sample(pieces, len(pieces))


def _mate(start: int, count: int) -> Piece:
    return Piece(start=start, count=count, is_mate=True)
