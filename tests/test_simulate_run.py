"""Simulation: equal to counting by hand where that can be done, to the engine step by step, and to itself."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from machines import POLICIES, make_config, make_device

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.pace import Pace
from cbjax.sampling import NUM_WORDS, SamplingParams
from cbjax.scheduler import Batch, SchedulerConfig, check
from cbjax.simulate import ConstantCost, LinearCost, Result, Simulation, Trace, make_trace, simulate, simulation_config
from cbjax.simulate.trace import MAX_VOCAB_SIZE
from cbjax.testing import HistoryHashDevice

SECOND = ConstantCost(step=1.0)


def random_trace(seed: int, count: int = 30, *, spread: float = 40.0) -> Trace:
    """Requests that often begin alike and sometimes quote an answer, in a span of `spread` seconds."""
    rng = np.random.default_rng(seed)
    segments, outputs = [], rng.integers(1, 14, count)
    for i in range(count):
        own = [(int(rng.integers(0, 3)), int(rng.integers(1, 9)))] if rng.random() < 0.7 else []
        if i and rng.random() < 0.3:
            j = int(rng.integers(0, i))
            own = [*segments[j], (1000 + j, int(outputs[j]))]
            own = own if sum(tokens for _, tokens in own) < 20 else []
        segments.append([*own, (100 + i, int(rng.integers(1, 9)))])
    prompt = [sum(tokens for _, tokens in own) for own in segments]
    arrival = np.sort(np.floor(rng.random(count) * spread))
    return make_trace(arrival, prompt, outputs, segments=segments, output_ids=1000 + np.arange(count))


def random_config(seed: int, **changes) -> SchedulerConfig:
    rng = np.random.default_rng(seed)
    settings = {
        "policy": POLICIES[seed % 2],
        "num_blocks": int(rng.integers(11, 16)) * len(changes.get("windows", (None,))),
        "max_batch_tokens": int(rng.choice([5, 16, 64])),
        "max_requests_per_batch": int(rng.choice([4, 8])),
        "safety_margin": float(rng.choice([0.0, 0.0, 0.3])),
        "host_blocks": int(rng.choice([0, 5, 30])),
        "shares_blocks": True,
    }
    return make_config(**(settings | changes))


def test_one_request_by_hand() -> None:
    trace = make_trace([2.5], [10], [4])
    result = simulate(trace, make_config(max_batch_tokens=6), cost=SECOND)
    # Chunks of 6 and 4, of which the second gives the first token; three more tokens, one a step.
    assert result.steps == {Bucket(kind="mixed", tokens=64, rows=8): 2, Bucket(kind="decode", tokens=2, rows=2): 3}
    assert (result.seconds, result.num_steps) == (7.5, 5)
    assert (result.admitted, result.completed, result.refused) == (1, 1, 0)
    assert (result.prompt_tokens, result.computed_tokens, result.generated_tokens) == (10, 13, 4)
    assert (result.waiting[0], result.first_token[0], result.latency[0]) == (0.0, 2.0, 5.0)
    assert result.inter_token.count == 3
    assert result.inter_token.quantiles([0.5, 1.0]) == pytest.approx([1.0, 1.0], rel=0.005)
    assert result.peak_blocks == 4  # 13 cells in blocks of 4
    assert result.timeline.seconds.tolist() == [2.5, 3.5, 4.5, 5.5, 6.5]
    assert result.timeline.live.tolist() == [2, 3, 3, 3, 4]
    assert result.timeline.running.tolist() == [1] * 5


def test_waiting_is_until_admission_and_idle_time_is_jumped() -> None:
    # One slot, so the second waits for the first and the third finds nobody.
    trace = make_trace([0.0, 1.0, 100.0], [4, 4, 4], [3, 2, 1])
    result = simulate(trace, make_config(max_requests_per_batch=1), cost=SECOND)
    assert result.waiting.tolist() == [0.0, 2.0, 0.0]
    assert result.first_token.tolist() == [1.0, 3.0, 1.0]
    assert result.latency.tolist() == [3.0, 4.0, 1.0]
    assert (result.num_steps, result.seconds) == (6, 101.0)
    assert result.timeline.waiting.tolist() == [0, 1, 1, 0, 0, 0]


def test_a_window_by_hand() -> None:
    """A prefill with the first token, windows of 4 and 2 steps with the others, and half a second of the host each."""
    trace = make_trace([0.0, 0.0], [4, 6], [7, 4])
    cost = LinearCost(step=1.0, dispatch=0.5, token=0.01)
    result = simulate(trace, make_config(), cost=cost, max_window=4)
    assert (result.num_steps, result.generated_tokens, result.computed_tokens) == (3, 11, 10 + 9)
    first = 0.5 + 1 + 0.1
    second = first + 0.5 + 4 + 0.07
    assert result.first_token.tolist() == pytest.approx([first, first])
    assert result.latency.tolist() == pytest.approx([second + 0.5 + 2 + 0.02, second])
    assert result.inter_token.count == 9
    # Within a window tokens come together.
    assert result.inter_token.quantiles([0.5])[0] < 1e-5
    single = simulate(trace, make_config(), cost=cost)
    assert single.generated_tokens == 11
    assert single.seconds == pytest.approx(7 * 1.5 + 0.19)
    with pytest.raises(ValueError, match="max_window must be from 1 to 16 steps; got 17"):
        simulate(trace, make_config(), max_window=17)


def test_a_run_can_be_looked_at_before_it_ends() -> None:
    simulation = Simulation(make_trace([0.0, 0.0, 9.0], [4, 4, 4], [1, 5, 5]), make_config(), cost=SECOND)
    for _ in range(2):
        simulation.step()
    result = simulation.result()
    assert (result.admitted, result.completed, result.num_steps, result.seconds) == (2, 1, 2, 2.0)
    assert result.latency.tolist() == pytest.approx([1.0, np.nan, np.nan], nan_ok=True)
    assert result.first_token.tolist() == pytest.approx([1.0, 1.0, np.nan], nan_ok=True)


def test_a_request_that_can_never_fit_is_refused_and_the_others_run() -> None:
    trace = make_trace([0.0, 0.0, 1.0], [8, 90, 8], [3, 3, 3])
    result = simulate(trace, make_config(num_blocks=10), cost=SECOND)
    assert (result.requests, result.refused, result.admitted, result.completed) == (3, 1, 2, 2)
    assert np.isnan(result.latency).tolist() == [False, True, False]
    assert "1 refused (larger than the pool)" in str(result)


def test_a_pool_that_holds_no_request_is_an_error_with_both_numbers() -> None:
    trace = make_trace([0.0, 0.0], [50, 41], [3, 3])
    with pytest.raises(ValueError, match=r"can have 40 KV cells \(num_blocks=10 .*smallest of 2 needs 43.*11 blocks"):
        simulate(trace, make_config(num_blocks=10))
    assert simulate(trace, make_config(num_blocks=11), cost=SECOND).completed == 1


def test_blocks_that_were_computed_are_found_again() -> None:
    # Four full blocks of 4; the second request finds three of them, since one token is left to compute.
    trace = make_trace([0.0, 10.0], [16, 16], [1, 1], segments=[[(5, 16)], [(5, 16)]])
    result = simulate(trace, make_config(shares_blocks=True), cost=SECOND)
    assert (result.prompt_tokens, result.cached_tokens, result.computed_tokens) == (32, 12, 20)
    assert result.hit_rate == 0.375
    assert "37.5% of prompt tokens found (12)" in str(result)
    off = simulate(trace, make_config(), cost=SECOND)
    assert (off.cached_tokens, off.computed_tokens, off.eviction) == (0, 32, None)


def test_blocks_taken_from_the_cache_are_counted() -> None:
    # Each prompt fills 3 of 4 blocks, 2 of which stay cached; the next takes 3: one blank, two from the cache.
    trace = make_trace([0.0, 10.0, 20.0], [11, 11, 11], [1, 1, 1])
    result = simulate(trace, make_config(num_blocks=4, shares_blocks=True), cost=SECOND)
    assert result.cache_evictions == 1 + 2
    assert result.timeline.cached.tolist() == [0, 1, 1]


def test_pressure_is_counted() -> None:
    """Two prompts fill the pool; when both want a block, the newer loses its own: 8 + 1 cells computed."""
    trace = make_trace([0.0, 0.0], [8, 8], [9, 9])
    result = simulate(trace, make_config(num_blocks=4), cost=SECOND)
    assert (result.soft_resets, result.offloads, result.first_eviction) == (1, 0, 1)
    assert (result.recomputed_tokens, result.evictions) == (8, 1)
    assert result.computed_tokens == 2 * 16 + 8
    assert "1 soft resets, 8 tokens computed again; the first in step 1" in str(result)
    kept = simulate(trace, make_config(num_blocks=4, host_blocks=4), cost=SECOND)
    assert (kept.soft_resets, kept.offloads, kept.offloaded_blocks, kept.restored_blocks) == (0, 1, 2, 2)
    assert (kept.recomputed_tokens, kept.restored_tokens, kept.computed_tokens) == (0, 8, 32)


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_conserved_and_every_state_is_sound(seed: int) -> None:
    trace, config = random_trace(seed), random_config(seed)
    simulation = Simulation(trace, config, cost=SECOND)
    while not simulation.is_done:
        plan = simulation.step()
        check(simulation.state)
        assert len(simulation.state.waiting) <= 2 * config.max_requests_per_batch
        tally, arrived = simulation.tally, int((trace.arrival < simulation.clock).sum())
        assert plan.batch.num_rows <= config.max_requests_per_batch
        assert tally.running == simulation.state.num_active
        assert tally.running + tally.ended <= arrived
    result = simulation.result()
    assert simulation.state.is_idle
    assert (result.admitted, result.completed) == (30, 30)
    assert result.generated_tokens == trace.output_tokens.sum()
    assert result.prompt_tokens == trace.prompt_tokens.sum()
    assert result.inter_token.count == result.generated_tokens - 30
    assert result.inter_token.total == pytest.approx((result.latency - result.first_token).sum())
    assert (result.waiting >= 0).all()
    assert (result.first_token > result.waiting).all()
    # What is computed: prompts and all outputs but the last, less what was found or came back, and again after resets.
    known = int(trace.num_cells.sum())
    if not result.evictions:
        assert result.computed_tokens == known - result.cached_tokens
    assert result.computed_tokens >= known - result.cached_tokens - result.restored_tokens


def same(first: Result, second: Result) -> bool:
    times = ("waiting", "first_token", "latency")
    equal = all(np.array_equal(getattr(first, name), getattr(second, name), equal_nan=True) for name in times)
    return equal and first.to_json() == second.to_json()


def test_a_run_is_a_function_of_its_arguments() -> None:
    trace, config = random_trace(3), random_config(3)
    first = simulate(trace, config)
    assert same(first, simulate(trace, config))
    assert not same(first, simulate(random_trace(4), config))
    assert not same(first, simulate(trace, config, cost=SECOND))


class TraceDevice(HistoryHashDevice):
    """The history-hash device, with all its checks, that answers with a trace's outputs."""

    trace: Trace

    def _answer(self, batch: BatchDescriptor, r: int, count: int, step: int) -> int:
        super()._answer(batch, r, count, step)
        return int(self.trace.outputs(batch.uid[r : r + 1], batch.output_index[r : r + 1] + step)[0])


def engine_batches(trace: Trace, config: SchedulerConfig, max_window: int) -> tuple[list[Batch], Engine]:
    """What the engine runs if requests are submitted when as many steps have been made as their arrival says."""
    config = replace(config, num_words=NUM_WORDS)
    fields = ("block_size", "num_blocks", "num_slots", "vocab_size", "windows")
    template = make_device(config)
    device = TraceDevice(
        **{name: getattr(template, name) for name in fields if name != "vocab_size"},
        max_blocks=config.max_blocks_per_request,
        vocab_size=MAX_VOCAB_SIZE,
    )
    device.trace = trace
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    batches: list[Batch] = []
    engine = Engine(
        device,
        config,
        ladder,
        vocab_size=MAX_VOCAB_SIZE,
        max_positions=10_000,
        pace=Pace(max_window=max_window, max_seconds=math.inf, step_seconds=0.0),
        observers=[lambda record: batches.append(record.plan.batch)],
    )
    clock, handed = 0, 0
    while handed < len(trace) or not engine.is_idle:
        if engine.is_idle:
            clock = max(clock, int(trace.arrival[handed]))
        while handed < len(trace) and trace.arrival[handed] <= clock:
            engine.submit(
                str(handed),
                trace.prompt(handed),
                max_new_tokens=int(trace.output_tokens[handed]),
                eos_token_ids=(),
                sampling=SamplingParams(),
            )
            handed += 1
        engine.step()
        clock += batches[-1].window
    return batches, engine


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_those_of_the_engine(seed: int) -> None:
    windows = [(None,), (None, 6), (5,)][seed % 3]
    trace = random_trace(seed, spread=[0.0, 15.0, 60.0][seed % 3])
    config = random_config(seed, windows=windows)
    max_window = (1, 4)[seed % 2]
    expected, engine = engine_batches(trace, config, max_window)
    simulation = Simulation(trace, config, cost=SECOND, max_window=max_window)
    batches = []
    while not simulation.is_done:
        batches.append(simulation.step().batch)
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert replace(batch, words=other.words) == other
    result, stats = simulation.result(), engine.stats
    assert result.steps == stats.steps
    assert bool(stats.windows) == (max_window > 1)
    same_counts = ("prompt_tokens", "cached_tokens", "recomputed_tokens", "soft_resets", "offloads", "peak_blocks")
    for name in (*same_counts, "offloaded_blocks", "restored_blocks"):
        assert getattr(result, name) == getattr(stats, name), name


def test_the_random_runs_see_hits_resets_offloads_and_requests_that_wait() -> None:
    results = [simulate(random_trace(s), random_config(s), cost=SECOND) for s in range(12)]
    assert sum(r.cached_tokens > 0 for r in results) > 8
    assert sum(r.soft_resets for r in results) > 5
    assert sum(r.offloads for r in results) > 5
    assert sum(r.cache_evictions for r in results) > 20
    assert sum(int((r.waiting > 0).sum()) for r in results) > 50


def test_the_usual_config_takes_the_policys_margin() -> None:
    assert simulation_config(num_blocks=9).safety_margin == 0.15
    assert simulation_config(num_blocks=9, policy="prefill_first").safety_margin == 0.0
    assert simulation_config(num_blocks=9).max_request_tokens == 9 * 64
    with pytest.raises(ValueError, match="scheduler_type must be one of"):
        simulation_config(num_blocks=9, policy="newest")


def test_simulating_does_not_import_jax() -> None:
    code = (
        "import sys; from cbjax.simulate import *; from cbjax.simulate import reserve_model\n"
        "print(simulate(workload_named('few_shot').sample(20, rate=9.0), simulation_config(num_blocks=99)))\n"
        "assert not {'jax', 'matplotlib', 'flax'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "20 of 20 completed" in run.stdout
