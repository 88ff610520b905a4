"""A cost model from measured steps.

A step's seconds are fitted as ``base of its bucket + sum of coefficient x amount``, every coefficient at least 0
(Lawson & Hanson, Solving Least Squares Problems, 1974, chapter 23). Errors count relative to what is usual in a bucket,
so that large steps do not drown small ones, and those far outside the others' spread count less (Huber, Robust
Statistics, 1981, section 7.8): a step that waited for a compiler or for another process says little about another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cbjax.scheduler import Bucket
from cbjax.simulate.cost import LinearCost, StepWork

# What a step can be of, beside its bucket: names that `StepWork` and `LinearCost` share, and those of the latter.
_AMOUNTS = ("rows", "tokens", "kv_reads", "offloaded", "restored", "copied")
_COEFFICIENTS = ("row", "token", "kv_read", "offloaded", "restored", "copied")
# A bucket that was seen has a base, since a step in it takes time whatever it does.
_LEAST_BASE = 1e-6
_ROUNDS = 10
# In robust standard deviations. Wide, since what a busy machine adds now and then is part of what steps take.
_HUBER = 3.0
_MAD_TO_SIGMA = 1.4826


class MeasuredStep(NamedTuple):
    """One step, and how long it took.

    Attributes:
      work: what it did.
      seconds: as `cbjax.measure_steps` takes them.
    """

    work: StepWork
    seconds: float


def fit_cost(steps: Sequence[MeasuredStep]) -> LinearCost:
    """The linear cost model that explains these steps best.

    Every bucket that was seen gets a base. `step` and `padded_token`, for other buckets, come from these bases.

    Raises:
      ValueError: there are no steps, or one did not take a positive number of seconds.
    """
    if not steps:
        raise ValueError("a cost is fitted to measured steps; got none: run requests while they are measured")
    seconds = np.array([step.seconds for step in steps])
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        wrong = seconds[~(np.isfinite(seconds) & (seconds > 0))][0]
        raise ValueError(f"a measured step takes a positive number of seconds; got {wrong}")
    buckets = sorted({step.work.bucket for step in steps})
    column = np.array([buckets.index(step.work.bucket) for step in steps])
    amounts = np.array([[getattr(step.work, name) for name in _AMOUNTS] for step in steps], np.float64)
    design = np.hstack([np.eye(len(buckets))[column], amounts])
    usual = np.array([np.median(seconds[column == i]) for i in range(len(buckets))])[column]
    found = _robust(design, seconds - _LEAST_BASE, 1 / usual)
    bases = found[: len(buckets)] + _LEAST_BASE
    step, padded_token = _of_other_buckets(buckets, bases)
    return LinearCost(
        buckets=dict(zip(buckets, bases.tolist(), strict=True)),
        step=step,
        padded_token=padded_token,
        **dict(zip(_COEFFICIENTS, found[len(buckets) :].tolist(), strict=True)),
    )


def _robust(design: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """f64[columns], at least 0, by least squares that are weighted anew until outliers count little.

    Args:
      scale: f64[rows], what makes errors of different rows comparable.
    """
    from scipy.optimize import nnls

    weights = np.ones(len(values))
    # Columns of like size, so that none is lost in rounding.
    sizes = np.abs(design * scale[:, None]).max(axis=0)
    sizes[sizes == 0] = 1.0
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        root = scale * np.sqrt(weights)
        found = nnls(design * root[:, None] / sizes, values * root)[0] / sizes
        errors = np.abs((design @ found - values) * scale)
        bound = _HUBER * _MAD_TO_SIGMA * np.median(errors)
        weights = np.minimum(1.0, bound / np.maximum(errors, 1e-12)) if bound > 1e-9 else np.ones(len(values))
    return found


def _of_other_buckets(buckets: Sequence[Bucket], bases: np.ndarray) -> tuple[float, float]:
    """Seconds of a step and of a token it has room for that come closest to the known bases."""
    design = np.array([[1.0, bucket.tokens] for bucket in buckets])
    step, padded_token = _robust(design, bases, 1 / bases)
    return float(step), float(padded_token)
