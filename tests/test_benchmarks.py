"""Every benchmark runs with tiny settings and writes the one JSON form."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from benchmark_fixtures import BUDGET, TINY

from benchmarks import (
    eviction,
    host_time,
    invariance,
    overlap,
    pool_size,
    prediction,
    report,
    sampling,
    scheduler,
    simulation,
    startup,
)
from benchmarks.device_queue import DeviceQueue
from benchmarks.eviction_model import PRIORITIES, hits
from benchmarks.hf_folder import write_folder
from benchmarks.workload import prompts
from cbjax.checkpoints import load
from cbjax.models import DecoderConfig, abstract_params
from cbjax.scheduler import EVICTION_MAPPING
from cbjax.testing import tiny_llama

ROOT = Path(__file__).parent.parent


def test_the_scheduler_benchmark_writes_the_form(measured):
    document = measured(scheduler.main, "--quick", "--running", 8, "--waiting", 0, 50)
    assert document["benchmark"] == "scheduler"
    for waiting in (0, 50):
        figures = {part: document["figures"][f"8 running, {waiting} waiting, {part}"] for part in scheduler.PARTS}
        assert {figure["count"] for figure in figures.values()} == {100}
    assert document["figures"]["8 running, 50 waiting, total"]["values"] == []
    assert "8 running, most against fewest waiting" in document["limits"]


def test_the_simulation_benchmark_writes_the_form(measured):
    document = measured(simulation.main, "--quick", "--requests", 60, "--rows", 16, "--num-blocks", 512)
    figures = document["figures"]
    assert figures["requests"]["median"] == 60
    assert figures["steps"]["median"] > 60 * 200 / 16 / 2
    assert 0 < figures["peak memory at 10%"]["median"] <= figures["peak memory at the end"]["median"]
    assert document["limits"].keys() == {"a million requests at this speed", "memory at the end against at 10%"}


def test_the_simulated_scheduler_keeps_as_many_running_and_waiting_as_asked():
    simulation = scheduler.Simulation(running=16, waiting=40)
    for _ in range(60):
        simulation.run(10)
        assert simulation.state.num_active + len(simulation.state.waiting) == 56
        assert simulation.state.num_active >= 14
    assert simulation.state.num_admissions > 30


def test_the_eviction_benchmark_writes_the_form(measured, tmp_path):
    """A file's prompts of two blocks come twice, which any policy finds; the models are there as well."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"[{i}.0, 1100, 4, [{i % 2}, {2 + i % 2}, {10 + i}]]\n" for i in range(6)))
    document = measured(eviction.main, "--quick", "--trace", file)
    figures = document["figures"]
    for policy in EVICTION_MAPPING:
        assert figures[f"mine, 1,500 blocks of 512, found, {policy}"]["median"] == pytest.approx(
            100 * 4 * 2 * 512 / 6600
        )
        assert figures[f"step, {policy}"]["count"] == 2 * eviction.TURN
    assert (
        figures["mine, 1,500 blocks of 512, found, clairvoyant alone"]
        == figures["mine, 1,500 blocks of 512, found, lru"]
    )
    assert {name.split(",")[0] for name in figures} == {"mine", "agents", "long sessions", "few_shot", "step"}


def test_a_cache_that_knows_the_future_finds_most():
    """Two prompts in turn, and in between one-time ones, in room for one of each."""
    requests = [[1, 2], [3, 4], [5, 6], [1, 2], [7, 8], [3, 4], [1, 2]]
    found = {name: hits(requests, 4, priority) for name, priority in PRIORITIES.items()}
    assert found["clairvoyant"] == 4
    assert found["lru"] == 0
    assert all(hits(requests, 100, priority) == 6 for priority in PRIORITIES.values())


def test_the_cache_alone_loses_the_end_of_a_prompt_first():
    assert hits([[1, 2, 3], [4], [1, 2, 3]], 3, PRIORITIES["lru"]) == 2
    assert hits([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 3, PRIORITIES["lru"]) == 3


def test_the_pool_size_benchmark_writes_the_form(measured, model):
    document = measured(pool_size.main, *TINY, "--model", model, "--rows", 4, "--blocks", 32, 64)
    assert document["settings"]["blocks"] == [32, 64]
    for kind in ("decode", "mixed"):
        assert f"float32, 4 rows, {kind}, 64 blocks" in document["figures"]
        assert f"float32, 4 rows, {kind}, large against small" in document["limits"]
    assert document["figures"]["float32, 4 rows, decode, 32 blocks"]["count"] == pool_size.NEW_TOKENS - 1


def test_the_sampling_benchmark_writes_the_form(measured, model):
    document = measured(sampling.main, *TINY, *BUDGET, "--model", model, "--requests", 2)
    assert document["figures"]["float32, greedy step of 2 rows"]["unit"] == "ms"
    assert document["limits"].keys() == {
        "float32, sampling's share of a step",
        "float32, sampled against greedy tokens",
    }


def test_the_invariance_benchmark_writes_the_form(measured, model):
    document = measured(invariance.main, *TINY, *BUDGET, "--model", model)
    assert document["figures"]["float32, 4 requests, on"]["unit"] == "tokens/s"
    assert document["limits"].keys() == {"float32, 4 requests, on against off"}
    (note,) = document["notes"]
    assert note.startswith("float32: 3 of 3 programs: all give the same bits")


def test_the_overlap_benchmark_keeps_the_same_account_for_stub_and_model(measured, model):
    document = measured(overlap.main, "--quick", *BUDGET, "--model", model, "--step-ms", 1, 2, more={"device_active"})
    active, figures = document["device_active"], document["figures"]
    assert {mode: by_ms.keys() for mode, by_ms in active.items()} == {mode: {"1", "2"} for mode in overlap.MODES}
    for mode, by_ms in active.items():
        assert all(0 < fraction <= 1 for fraction in by_ms.values())
        assert by_ms["2"] == figures[f"2 ms a step, {mode}, device-active"]["median"]
        assert figures[f"model in float32, {mode}, tokens/s"]["median"] > 0
    assert document["limits"].keys() == {"2 ms a step, async, device-active"}


def test_the_queue_of_the_stub_device_accounts_for_every_second():
    """Three jobs that come together wait for one another; the fourth comes when the queue has been empty a while."""
    with DeviceQueue() as queue:
        jobs = [queue.put(seconds) for seconds in (0.5, 0.02, 0.02)]
        assert not queue.is_done(jobs[-1])
        queue.wait(jobs[-1])
        assert all(queue.is_done(job) for job in jobs)
        time.sleep(0.05)
        queue.wait(queue.put(0.02))
        times, again = queue.take_times(), queue.take_times()
    assert times.busy >= 0.5 + 3 * 0.02
    assert times.idle >= 0.05
    assert times.active == times.busy / (times.busy + times.idle)
    assert times.handoff > 0
    assert (again.busy, again.idle, again.handoff) == (0, 0, 0)


def test_the_host_time_benchmark_measures_decode_steps_and_streaming(measured):
    document = measured(host_time.main, "--quick", "--rows", 3)
    parts = [document["figures"][f"3 rows, {part}"] for part in host_time.PHASES]
    # 15 steps follow the first token, and nothing the last.
    assert {part["count"] for part in parts} == {14}
    assert document["figures"]["3 rows, streaming"]["count"] == 14
    assert document["figures"]["3 rows, in windows"]["count"] > 0
    assert document["limits"] == {}


def test_the_prediction_benchmark_evicts_and_predicts_every_batch(measured, model):
    document = measured(prediction.main, "--quick", *BUDGET, "--model", model)
    figures, limits = document["figures"], document["limits"]
    for kind in (prediction.RESET, prediction.OFFLOAD):
        assert figures[f"{kind}, evictions"]["median"] > 0
        assert figures[f"{kind}, steps, predicted"] == figures[f"{kind}, steps, measured"]
        assert limits[f"{kind}, {prediction.DIFFER}"] == {"rule": "at most", "bound": 0, "holds": True}
        assert limits[f"{kind}, {prediction.OFF_BY}"]["bound"] == 0.15


def test_a_written_folder_loads_as_the_same_model(model):
    lm, again = tiny_llama(num_layers=1), load(model)
    assert again.config == lm.config
    assert again.eos_token_ids == ()
    assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    for old, new in zip(jax.tree.leaves(lm.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_model_that_is_no_plain_llama_is_not_written_as_one(tmp_path):
    config = DecoderConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        max_positions=8, qkv_bias=True,
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(config))
    with pytest.raises(ValueError, match="only a plain Llama"):
        write_folder(tmp_path, config, params)


def test_fewer_prompts_are_the_first_of_more():
    some, more = prompts(16, 1000), prompts(64, 1000)
    assert more[:16] == some
    lengths = [len(prompt) for prompt in more]
    assert min(lengths) >= 16
    assert max(lengths) <= 127
    assert len(set(lengths)) > 20


def test_a_spread_has_the_nearest_rank_percentile_and_keeps_few_values():
    assert report.spread([3.0, 1.0, 2.0], "s") == {
        "unit": "s", "median": 2.0, "min": 1.0, "max": 3.0, "p99": 3.0, "count": 3, "values": [3.0, 1.0, 2.0],
    }  # fmt: skip
    many = report.spread([float(i) for i in range(1, 201)], "s")
    assert (many["p99"], many["values"]) == (198.0, [])


def test_more_threads_than_cores_are_refused():
    with pytest.raises(ValueError, match="--threads asks for 100000 cores"), report.threads(100_000):
        pass


def test_the_startup_benchmark_starts_twice_and_writes_the_form(measured, model):
    document = measured(startup.main, *TINY, "--model", model, "--only", "every-program", "--max-batch-tokens", 8)
    figures, limits = document["figures"], document["limits"]
    programs = figures["float32, every program, cold, programs"]["median"]
    assert figures["float32, every program, cold, found"]["median"] == 0
    assert figures["float32, every program, warm, found"]["median"] == programs
    for kind in ("cold", "warm"):
        parts = [figures[f"float32, every program, {kind}, of it {part}"]["median"] for part in startup.PARTS]
        assert 0 < sum(parts) <= figures[f"float32, every program, {kind}"]["median"]
    assert limits["float32, every program, cold, programs"] == {"rule": "at most", "bound": 24, "holds": True}
    assert limits["float32, every program, warm against cold"]["bound"] == 0.4


def test_startup_says_what_failed(tmp_path):
    with pytest.raises(RuntimeError, match=r"generate --model .*nowhere.* exited with"):
        startup.first_text(str(tmp_path), str(tmp_path / "nowhere"), "float32")


@pytest.mark.parametrize(
    "name",
    [
        "invariance",
        "pool_size",
        "prediction",
        "pressure",
        "sampling",
        "scheduler",
        "simulation",
        "startup",
        "vs_transformers",
    ],
)
def test_a_benchmark_is_a_module_to_run(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert f"python -m benchmarks.{name}" in run.stdout
    assert "--json" in run.stdout
