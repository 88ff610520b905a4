"""What a simulation leaves: quantiles, a timeline that does not grow, sweeps, text forms and pictures."""

import importlib
import json
import sys

import numpy as np
import pytest
from machines import make_config

from cbjax.simulate import (
    ConstantCost,
    make_trace,
    plot_result,
    plot_sweep,
    run_sweep,
    simulate,
    simulation_config,
    workload_named,
)
from cbjax.simulate.statistics import Histogram, Sampler

SECOND = ConstantCost(step=1.0)


def test_a_histograms_quantiles_are_those_of_the_values_to_half_a_percent() -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(-3, 2, 20_000))
    histogram = Histogram()
    for part in np.array_split(values, 50):
        histogram.add(part)
    at = [0.01, 0.5, 0.9, 0.99, 1.0]
    exact = np.quantile(values, at, method="inverted_cdf")
    assert histogram.quantiles(at) == pytest.approx(exact.tolist(), rel=0.0051)
    assert histogram.count == 20_000
    assert histogram.total == pytest.approx(values.sum())
    assert histogram.largest == values.max()


def test_a_histogram_takes_nothing_and_extremes() -> None:
    histogram = Histogram()
    assert np.isnan(histogram.quantiles([0.5])).all()
    histogram.add(np.empty(0))
    histogram.add(np.array([0.0, 1e12]))
    low, high = histogram.quantiles([0.5, 1.0])
    assert 0 <= low < 2e-6
    assert high > 1e8


def test_a_timeline_keeps_few_points_evenly_spread() -> None:
    sampler = Sampler(most=8)
    for i in range(100):
        sampler.add(float(i), 2 * i, i, 1, 0)
        points = sampler.timeline().seconds
        assert 1 <= len(points) <= 8
        assert len(set(np.diff(points).tolist())) <= 1
    timeline = sampler.timeline()
    assert timeline.seconds.tolist() == [0.0, 16.0, 32.0, 48.0, 64.0, 80.0, 96.0]
    assert timeline.live.tolist() == [2 * s for s in range(0, 97, 16)]


def test_the_closing_table_has_a_line_for_each_thing() -> None:
    result = simulate(workload_named("few_shot").sample(30, rate=20.0), simulation_config(num_blocks=64))
    lines = str(result).splitlines()
    labels = ["trace", "pool", "requests", "tokens", "speed", "waiting", "first token", "latency", "inter token"]
    labels += ["steps", "blocks", "prefix cache", "KV pressure"]
    assert [line[:14].strip() for line in lines] == labels
    assert "64 blocks of 64, margin 0.15, fifo" in lines[1]
    assert "30 of 30 completed" in lines[2]
    one = simulate(make_trace([0.0], [4], [1]), make_config(), cost=SECOND)
    assert "inter token   -" in str(one)


def test_the_text_form_is_json_and_has_the_table_s_figures() -> None:
    one = simulate(make_trace([0.0], [4], [1]), make_config(), cost=SECOND)
    made = json.loads(one.to_json())
    assert made["format"] == "cbjax.simulate.Result/1"
    assert made["times"]["inter_token"] == {"p50": None, "p90": None, "p99": None}
    assert made["times"]["latency"]["p99"] == 1.0
    assert made["steps"] == {"mixed(64 tokens, 8 rows)": 1}
    assert made["timeline"]["live"] == [1]
    assert "NaN" not in one.to_json()


@pytest.fixture(scope="module")
def small():
    return workload_named("few_shot").sample(40, rate=30.0, seed=1)


def test_a_sweep_runs_every_combination_and_processes_change_nothing(small) -> None:
    vary = {"eviction": ["lru", "lifo"], "num_blocks": [2, 64, 256]}
    config = simulation_config(num_blocks=1, max_requests_per_batch=16)
    made = run_sweep(small, config, vary)
    settings = [tuple(point.settings.values()) for point in made.points]
    assert settings == [(name, blocks) for name in ("lru", "lifo") for blocks in (2, 64, 256)]
    too_small, *fitting = made.points[:3]
    assert too_small.result is None
    for point in fitting:
        alone = simulate(small, simulation_config(**point.settings, max_requests_per_batch=16))
        assert point.result is not None
        assert point.result.to_json() == alone.to_json()
    lines = str(made).splitlines()
    assert len(lines) == 7
    assert "no request fits the pool" in lines[1]
    assert run_sweep(small, config, vary, processes=2).to_json() == made.to_json()


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"blocks": [3]}, r"vary maps settings \(policy, num_blocks.*got \['blocks'\]"),
        ({}, "one value or more each"),
        ({"num_blocks": []}, "one value or more each"),
        ({"safety_margin": [1.5]}, r"safety_margin must be in \[0, 1\]; got 1.5"),
        ({"eviction": ["best"]}, "eviction_policy must be one of"),
    ],
)
def test_a_bad_sweep_is_refused(small, vary: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_sweep(small, simulation_config(num_blocks=64), vary)
    with pytest.raises(ValueError, match="processes must be at least 1; got 0"):
        run_sweep(small, simulation_config(num_blocks=64), {"num_blocks": [64]}, processes=0)


def test_pictures_are_drawn(small, tmp_path) -> None:
    config = simulation_config(num_blocks=64)
    figure = plot_result(simulate(small, config))
    assert [axes.get_title(loc="left").partition(" ")[0] for axes in figure.axes] == [
        "blocks",
        "requests",
        "from",
        "between",
    ]
    figure.savefig(tmp_path / "run.png")
    made = run_sweep(small, config, {"eviction": ["lru", "lifo"], "num_blocks": [2, 32, 64]})
    figure = plot_sweep(made)
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["eviction lru", "eviction lifo"]
        assert np.asarray(axes.lines[0].get_xdata()).tolist() == [32, 64]
    figure.savefig(tmp_path / "sweep.png")
    for name in ("run.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(small, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install cbjax\[plot\]"):
        plot_result(simulate(small, simulation_config(num_blocks=64)))
    importlib.import_module("cbjax.simulate.plot")


def test_a_bar_shows_how_many_requests_have_ended(small, capsys) -> None:
    simulate(small, simulation_config(num_blocks=64), progress_bar=True)
    run_sweep(small, simulation_config(num_blocks=64), {"num_blocks": [64, 96]}, progress_bar=True)
    shown = capsys.readouterr()
    assert "simulating" in shown.err
    assert "40/40" in shown.err
    assert "2/2" in shown.err
    assert not shown.out
    simulate(small, simulation_config(num_blocks=64))
    assert capsys.readouterr() == ("", "")
