"""A trace: when requests come, how long they are, and which of them begin alike. A value, made of a few arrays.

Nothing of a request's text is kept. A prompt is a sequence of *segments* (id, tokens): prompts whose segments are equal
up to some point hold equal tokens up to there, and other ids mean other tokens. Token ids are made when they are asked
for, by mixing a segment's id with the place in it, so a trace of a million requests takes some 50 MB and a request's
tokens are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cbjax.simulate.quantiles import Quantiles

# Token ids are in [0, 2**31), so that segments differ in any block, unless a model's vocabulary is asked for.
MAX_VOCAB_SIZE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival; made by `make_trace`, `read_trace` or a workload model. Arrays are read-only.

    Attributes:
      name: for tables and pictures.
      arrival: f64[n], seconds, ascending.
      prompt_tokens, output_tokens: i32[n], at least one each.
      offsets: i64[n + 1], request i's segments are ``offsets[i]:offsets[i + 1]``.
      segment_ids, segment_tokens: i64/i32[segments], at least one token each.
      output_ids: i64[n], what a request generates is the beginning of this segment, so that a later prompt can quote
        it; negative where none does.
    """

    name: str
    arrival: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    offsets: np.ndarray
    segment_ids: np.ndarray
    segment_tokens: np.ndarray
    output_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)

    def __repr__(self) -> str:
        return f"Trace({self.name}: {len(self)} requests in {self.span:.1f} s)"

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0])

    @property
    def num_cells(self) -> np.ndarray:
        """i64[n], KV cells each request comes to need: the last output token is never fed back."""
        return self.prompt_tokens.astype(np.int64) + self.output_tokens - 1

    def prompt(self, index: int, vocab_size: int = MAX_VOCAB_SIZE) -> np.ndarray:
        """i32[prompt_tokens[index]], a request's token ids in ``[0, vocab_size)``."""
        first, end = self.offsets[index], self.offsets[index + 1]
        if end - first == 1:
            size = int(self.prompt_tokens[index])
            return mixed(self.segment_ids[first:end], np.arange(size), vocab_size)
        sizes = self.segment_tokens[first:end]
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        return mixed(np.repeat(self.segment_ids[first:end], sizes), places, vocab_size)

    def outputs(self, requests: np.ndarray, index: np.ndarray, vocab_size: int = MAX_VOCAB_SIZE) -> np.ndarray:
        """i32[rows], the output token number `index` (from 0) of each of `requests`."""
        return mixed(self.output_ids[requests], index, vocab_size)

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        count = min(count, len(self))
        _at_least("count", count, 1)
        last = self.offsets[count]
        return replace(
            self,
            **{name: getattr(self, name)[:count] for name in ("arrival", "prompt_tokens", "output_tokens")},
            offsets=self.offsets[: count + 1],
            segment_ids=self.segment_ids[:last],
            segment_tokens=self.segment_tokens[:last],
            output_ids=self.output_ids[:count],
        )

    def scaled(self, rate: float) -> Trace:
        """The same requests in the same rhythm, `rate` of them a second on average.

        Raises:
          ValueError: all of them come at once, so that there is no rhythm.
        """
        _positive("rate", rate)
        if not self.span:
            raise ValueError(
                f"a trace whose {len(self)} requests come at once cannot be scaled to a rate; use with_poisson_arrivals"
            )
        return self._arriving((self.arrival - self.arrival[0]) * ((len(self) - 1) / (rate * self.span)))

    def with_poisson_arrivals(self, rate: float, *, seed: int = 0) -> Trace:
        """The same requests in the same order, coming independently of each other, `rate` a second on average."""
        _positive("rate", rate)
        return self._arriving(arrivals(np.random.default_rng(seed), len(self), rate))

    def _arriving(self, arrival: np.ndarray) -> Trace:
        return replace(self, arrival=frozen(arrival, np.float64))


def mixed(ids: np.ndarray, places: np.ndarray, vocab_size: int) -> np.ndarray:
    """i32, a token for each (id, place): the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(33)
    return (x if vocab_size == MAX_VOCAB_SIZE else x % np.uint64(vocab_size)).astype(np.int32)


def arrivals(rng: np.random.Generator, count: int, rate: float | None, gap: Quantiles | None = None) -> np.ndarray:
    """f64[count], ascending, `rate` a second on average; all 0 without a rate.

    Args:
      gap: between two, in any unit; None: exponential, which makes a Poisson process.
    """
    _at_least("num_requests", count, 1)
    if rate is None:
        return np.zeros(count)
    _positive("rate", rate)
    if gap is None:
        return np.cumsum(rng.exponential(1 / rate, count))
    gaps = gap.at(rng.random(count))
    return np.cumsum(gaps / (gap.mean * rate))


def frozen(array: np.ndarray, dtype: type) -> np.ndarray:
    """A private, read-only copy."""
    array = np.array(array, dtype)
    array.setflags(write=False)
    return array


def _positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number; got {value}")


def _at_least(name: str, value: int, bound: int) -> None:
    if value < bound:
        raise ValueError(f"{name} must be at least {bound}; got {value}")
