"""What a long run leaves behind, in memory that does not grow: quantiles of many values, and a few points in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Bins of a histogram: 0.5% wide, from a microsecond to about 20 years.
_LOWEST = 1e-6
_WIDTH = math.log(1.005)
_BINS = 6800


class Histogram:
    """Counts of values by size, in seconds; quantiles are exact to half a percent.

    Attributes:
      counts: i64[bins]; the first is for all below a microsecond.
      total, largest: sum and maximum of the values, exact.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.int64)
        self.total, self.largest = 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """Counts `values`, f64[n], at least 0."""
        if len(values):
            bins = np.log(np.maximum(values, _LOWEST) * (1 / _LOWEST)) * (1 / _WIDTH)
            found = np.bincount(np.minimum(bins.astype(np.int64), _BINS - 1))
            self.counts[: len(found)] += found
            self.total += float(values.sum())
            self.largest = max(self.largest, float(values.max()))

    @property
    def count(self) -> int:
        """Values counted."""
        return int(self.counts.sum())

    def quantiles(self, at: Sequence[float]) -> list[float]:
        """The values below which these fractions lie (nearest rank); NaN if nothing was counted."""
        ends = np.cumsum(self.counts)
        if not ends[-1]:
            return [math.nan] * len(at)
        ranks = np.maximum(np.ceil(np.array(at) * ends[-1]), 1)
        middles = _LOWEST * np.exp((np.searchsorted(ends, ranks) + 0.5) * _WIDTH)
        return [min(float(value), self.largest) for value in middles]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The state after some of a run's steps, evenly spread: one value per point.

    Attributes:
      seconds: f64, simulated, since the start.
      live, cached: i32, blocks that requests hold, and those that only hold what may be found again.
      running, waiting: i32, requests.
    """

    seconds: np.ndarray
    live: np.ndarray
    cached: np.ndarray
    running: np.ndarray
    waiting: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)


class Sampler:
    """Collects a timeline of at most `most` points: whenever these are full, every second one is given up."""

    def __init__(self, most: int = 2048) -> None:
        self._values = np.zeros((most, 5))
        self._count, self._seen, self._stride = 0, 0, 1

    def add(self, seconds: float, live: int, cached: int, running: int, waiting: int) -> None:
        """One step."""
        if self._seen % self._stride == 0:
            if self._count == len(self._values):
                self._count = len(self._values) // 2
                self._values[: self._count] = self._values[: 2 * self._count : 2].copy()
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._values[self._count] = (seconds, live, cached, running, waiting)
                self._count += 1
        self._seen += 1

    def timeline(self) -> Timeline:
        """What was collected."""
        seconds, *counts = self._values[: self._count].T.copy()
        live, cached, running, waiting = (column.astype(np.int32) for column in counts)
        return Timeline(seconds=seconds, live=live, cached=cached, running=running, waiting=waiting)
