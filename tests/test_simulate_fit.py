"""Cost models from measured steps: the model that made the times is found again, and what cannot be is refused."""

import numpy as np
import pytest

from cbjax.scheduler import Bucket
from cbjax.simulate import LinearCost, MeasuredStep, StepWork, fit_cost

DECODE = [Bucket(kind="decode", tokens=rows, rows=rows) for rows in (2, 8, 16)]
MIXED = [Bucket(kind="mixed", tokens=tokens, rows=16) for tokens in (64, 128)]
TRUE = LinearCost(
    buckets={bucket: 0.01 + 1e-4 * bucket.tokens for bucket in (*DECODE, *MIXED)},
    row=2e-5,
    token=5e-5,
    kv_read=1e-6,
    offloaded=1e-3,
    restored=2e-3,
)


def measured(count: int = 400, *, noise: float = 0.0, outliers: float = 0.0) -> list[MeasuredStep]:
    """Steps that take what TRUE says, but for the noise, and a twenty times that for outliers."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        bucket = (*DECODE, *MIXED)[rng.integers(5)]
        rows = int(rng.integers(1, bucket.rows + 1))
        work = StepWork(
            bucket=bucket,
            rows=rows,
            tokens=rows if bucket.kind == "decode" else int(rng.integers(rows, bucket.tokens + 1)),
            kv_reads=int(rng.integers(0, 2000)),
            offloaded=int(rng.integers(0, 4)) * (rng.random() < 0.1),
            restored=int(rng.integers(0, 4)) * (rng.random() < 0.1),
        )
        factor = (1 + noise * rng.normal()) * (20 if rng.random() < outliers else 1)
        steps.append(MeasuredStep(work, TRUE.seconds(work) * factor))
    return steps


def numbers(cost: LinearCost) -> list[float]:
    return [*(cost.buckets[b] for b in sorted(cost.buckets)), cost.row, cost.token, cost.kv_read, cost.offloaded,
        cost.restored, cost.copied]  # fmt: skip


def test_the_model_that_made_the_times_is_found_again() -> None:
    cost = fit_cost(measured())
    assert numbers(cost) == pytest.approx(numbers(TRUE), rel=1e-6)
    # What was true of all bases holds of buckets that were not seen.
    assert (cost.step, cost.padded_token) == pytest.approx((0.01, 1e-4))
    other = StepWork(bucket=Bucket(kind="mixed", tokens=256, rows=16), rows=1, tokens=200)
    assert cost.seconds(other) == pytest.approx(0.01 + 0.0256 + 2e-5 + 0.01)


def test_noise_and_outliers_change_little() -> None:
    steps = measured(2000, noise=0.05, outliers=0.05)
    cost, work = fit_cost(steps), [step.work for step in steps]
    truth, found = (sum(map(model.seconds, work)) for model in (TRUE, cost))
    assert found == pytest.approx(truth, rel=0.02)
    assert sum(step.seconds for step in steps) > 1.5 * truth
    assert [cost.buckets[b] for b in DECODE] == pytest.approx([TRUE.buckets[b] for b in DECODE], rel=0.03)
    assert cost.kv_read == pytest.approx(TRUE.kv_read, rel=0.1)


def test_no_coefficient_is_negative_and_no_base_is_zero() -> None:
    # The more rows the faster: what no coefficient of a row can say.
    work = [StepWork(bucket=DECODE[2], rows=rows, tokens=rows) for rows in range(1, 17)]
    cost = fit_cost([MeasuredStep(w, 0.02 - 1e-3 * w.rows) for w in work])
    assert (cost.row, cost.token) == (0.0, 0.0)
    assert 0.004 < cost.buckets[DECODE[2]] < 0.02
    proportional = fit_cost([MeasuredStep(w, 1e-3 * w.rows) for w in work])
    assert proportional.buckets[DECODE[2]] > 0
    assert proportional.seconds(work[7]) == pytest.approx(8e-3, rel=1e-3)


def test_one_step_is_enough_for_its_own_bucket() -> None:
    step = MeasuredStep(StepWork(bucket=DECODE[0], rows=2, tokens=2, kv_reads=10), 0.5)
    assert fit_cost([step]).seconds(step.work) == pytest.approx(0.5)


def test_steps_that_took_no_time_and_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="fitted to measured steps; got none"):
        fit_cost([])
    work = StepWork(bucket=DECODE[0], rows=1, tokens=1)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"a positive number of seconds; got {seconds}"):
            fit_cost([MeasuredStep(work, 0.1), MeasuredStep(work, seconds)])
