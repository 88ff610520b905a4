"""Costs of a step: the linear model by hand, its text form, and the roofline."""

import json

import pytest
from machines import make_config

from cbjax.ladder import make_ladder
from cbjax.scheduler import Bucket
from cbjax.simulate import ConstantCost, Hardware, LinearCost, ModelSize, StepWork, make_trace, roofline, simulate
from cbjax.simulate.roofline import A100, H100, LLAMA_3_8B, TPU_V5E, TPU_V6E

DECODE = Bucket(kind="decode", tokens=8, rows=8)
MIXED = Bucket(kind="mixed", tokens=64, rows=8)
WORK = StepWork(bucket=DECODE, rows=3, tokens=3, kv_reads=100, offloaded=2, restored=3, copied=4)


def test_a_linear_cost_is_a_base_and_a_term_for_each_kind_of_work() -> None:
    cost = LinearCost(
        buckets={DECODE: 1000.0}, row=1.0, token=10.0, kv_read=0.5, offloaded=0.1, restored=0.01, copied=0.001
    )
    assert cost.seconds(WORK) == pytest.approx(1000 + 3 + 30 + 50 + 0.2 + 0.03 + 0.004)
    assert LinearCost(step=2.0, padded_token=0.5).seconds(WORK) == 2.0 + 0.5 * 8
    assert LinearCost(buckets={DECODE: 5.0}, step=2.0).seconds(WORK._replace(bucket=MIXED)) == 2.0
    assert ConstantCost(step=3.0).seconds(WORK) == 3.0


def test_a_bucket_without_a_base_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"lacks mixed\(64 tokens, 8 rows\) and has decode\(8\).*same ladder"):
        LinearCost(buckets={DECODE: 5.0}).seconds(WORK._replace(bucket=MIXED))


def test_a_cost_survives_its_text_form() -> None:
    cost = LinearCost(buckets={MIXED: 0.25, DECODE: 1 / 3}, step=0.1, kv_read=1e-9, copied=2.0)
    assert LinearCost.from_json(cost.to_json()) == cost


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "cbjax.simulate.LinearCost/0"}, "format 'cbjax.simulate.LinearCost/1'; got .*/0': measure"),
        ({"speed": 3}, r"coefficients \[.*got \['speed'\]"),
        ({"token": "fast"}, "a number of seconds; got 'fast' for token"),
        ({"token": -1.0}, "at least 0; got -1.0 for token"),
        ({"token": float("inf")}, "at least 0; got inf for token"),
        ({"buckets": [{"kind": "decode"}]}, "kind, tokens, rows and seconds; got"),
    ],
)
def test_a_text_that_is_no_cost_is_refused(changes: dict, message: str) -> None:
    good = json.loads(LinearCost(buckets={DECODE: 1.0}).to_json())
    LinearCost.from_json(json.dumps(good))
    with pytest.raises(ValueError, match=message):
        LinearCost.from_json(json.dumps(good | changes))


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_a_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a cost model"):
        LinearCost.from_json(text)


def test_the_roofline_is_bound_by_memory_at_few_tokens_and_by_arithmetic_at_many() -> None:
    machine = Hardware(
        name="toy",
        flops=1e12,
        bytes_per_second=1e11,
        host_bytes_per_second=1e10,
        compute_efficiency=0.5,
        memory_efficiency=0.5,
        overhead=0.25,
    )
    model = ModelSize(name="toy", parameters=1e9, weight_bytes=2e9, kv_bytes_per_token=1000)
    cost = roofline(make_ladder(max_batch_tokens=4096, max_rows=8), block_size=16, hardware=machine, model=model)
    few, many = DECODE, Bucket(kind="mixed", tokens=4096, rows=8)
    assert cost.buckets[few] == pytest.approx(0.25 + 2e9 / 5e10)
    assert cost.buckets[many] == pytest.approx(0.25 + 2 * 1e9 * 4096 / 5e11)
    base = cost.buckets[few]
    assert cost.seconds(StepWork(bucket=few, rows=1, tokens=1, kv_reads=5_000_000)) == pytest.approx(base + 0.1)
    moved = StepWork(bucket=few, rows=1, tokens=1, offloaded=10, restored=20, copied=5)
    assert cost.seconds(moved) == pytest.approx(base + 30 * 16_000 / 1e10 + 2 * 5 * 16_000 / 5e10)


def test_every_machine_has_a_roofline_and_a_faster_one_a_lower() -> None:
    ladder = make_ladder(max_batch_tokens=8192, max_rows=256)
    largest = ladder.mixed[-1]
    times = {
        m.name: roofline(ladder, block_size=64, hardware=m).buckets[largest] for m in (H100, A100, TPU_V5E, TPU_V6E)
    }
    assert times["H100 SXM"] < times["TPU v6e"] < times["A100 80GB SXM"] < times["TPU v5e"]
    assert roofline(ladder, block_size=64) == roofline(ladder, block_size=64, hardware=H100, model=LLAMA_3_8B)


def test_a_machine_or_model_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="flops of x must be a positive number; got 0"):
        Hardware(name="x", flops=0, bytes_per_second=1, host_bytes_per_second=1)
    with pytest.raises(ValueError, match=r"memory_efficiency is a fraction in \(0, 1\]; got 1.5"):
        Hardware(name="x", flops=1, bytes_per_second=1, host_bytes_per_second=1, memory_efficiency=1.5)
    with pytest.raises(ValueError, match="parameters of y must be"):
        ModelSize(name="y", parameters=float("nan"), weight_bytes=1, kv_bytes_per_token=1)


def test_a_simulation_takes_as_long_as_its_steps() -> None:
    trace = make_trace([0.0, 0.0], [8, 8], [3, 5])
    result = simulate(trace, make_config(), cost=LinearCost(step=1.0, padded_token=0.25, token=10.0))
    # One mixed step of 16 tokens; two decodes of 2 rows, two of one, in buckets of 2.
    assert result.seconds == pytest.approx((1 + 0.25 * 64 + 160) + 2 * (1 + 0.5 + 20) + 2 * (1 + 0.5 + 10))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_time_ends_the_simulation(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"a positive number of seconds; got {seconds} for StepWork\(bucket=.*rows=1"):
        simulate(make_trace([0.0], [8], [3]), make_config(), cost=ConstantCost(step=seconds))
