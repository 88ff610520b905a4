"""Distributions as tables of quantiles, which is how workloads are published."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of positive numbers.

    Attributes:
      points: (fraction, value), both ascending, from fraction 0 to fraction 1; between them the logarithm is linear.

    Raises:
      ValueError: the points are not so.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        fractions, values = np.array(self.points, np.float64).reshape(-1, 2).T
        is_whole = len(fractions) > 1 and (fractions[0], fractions[-1]) == (0, 1)
        if not (is_whole and (np.diff(fractions) > 0).all() and (np.diff(values) >= 0).all() and values[0] > 0):
            raise ValueError(
                "quantiles are (fraction, value) with ascending fractions from 0 to 1 and ascending positive values; "
                f"got {self.points}"
            )

    @property
    def mean(self) -> float:
        """Of the distribution: between two points, the integral of an exponential."""
        fractions, values = np.array(self.points, np.float64).T
        low, high = values[:-1], values[1:]
        ratio = np.log(high / low)
        parts = np.where(ratio < 1e-9, low, (high - low) / np.maximum(ratio, 1e-9))
        return float((np.diff(fractions) * parts).sum())

    def at(self, fractions: np.ndarray) -> np.ndarray:
        """f64, the values below which these fractions lie."""
        points, values = np.array(self.points, np.float64).T
        return np.exp(np.interp(fractions, points, np.log(values)))

    def tokens(self, fractions: np.ndarray) -> np.ndarray:
        """i32, the same as whole numbers, at least 1."""
        return np.maximum(np.rint(self.at(fractions)), 1).astype(np.int32)


def correlated(rng: np.random.Generator, count: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Two uniform variables in ``(0, 1)``, f64[count] each, coupled by a Frank copula.

    Args:
      theta: 0: independent; Spearman's rank correlation is about ``theta / 6`` for small values.
    """
    first, second = rng.random(count), rng.random(count)
    if theta:
        shrunk = np.exp(-theta * first)
        second = -np.log1p(second * np.expm1(-theta) / (second + (1 - second) * shrunk)) / theta
    return first, second
