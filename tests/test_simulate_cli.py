"""`cbjax simulate`: tables, sweeps, pictures and JSON of what the library says, and clear errors."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbjax import cli
from cbjax.scheduler import EVICTION_MAPPING, Bucket
from cbjax.simulate import (
    LinearCost,
    read_trace,
    run_sweep,
    simulate,
    simulation_config,
    workload_named,
)

ROOT = Path(__file__).parent.parent
CSV = "arrival_s,prompt_tokens,output_tokens\n0,100,20\n0.01,300,5\n0.5,64,30\n"
PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path):
    """A file of three requests."""
    path = tmp_path / "mine.csv"
    path.write_text(CSV)
    return path


@pytest.fixture
def run(capsys):
    """Runs `cbjax simulate`: exit status, standard output, standard error without the progress bar."""

    def run(*arguments):
        status = cli.main(["simulate", *map(str, arguments)])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.replace("\r", "\n").splitlines() if not line.startswith("simulating")]
        return status, captured.out, "\n".join(filter(None, lines))

    return run


# One simulation.


def test_a_trace_is_simulated_and_its_table_shown(run, trace):
    expected = simulate(read_trace(trace), simulation_config(num_blocks=20))
    assert run(trace, "--num-blocks", 20) == (0, f"{expected}\n", "")
    assert "3 of 3 completed" in str(expected)


def test_every_option_reaches_the_simulation(run, trace):
    options = {
        "--num-blocks": 40, "--block-size": 16, "--margin": 0.3, "--offload": 7, "--rows": 2, "--max-batch-tokens": 70,
        "--scheduler": "prefill_first", "--eviction": "lifo", "--requests": 2, "--rate": 100.0,
    }  # fmt: skip
    config = simulation_config(
        num_blocks=40, block_size=16, policy="prefill_first", safety_margin=0.3, max_batch_tokens=70,
        max_requests_per_batch=2, host_blocks=7, eviction="lifo",
    )  # fmt: skip
    expected = simulate(read_trace(trace).head(2).scaled(100.0), config)
    status, out, _ = run(trace, *(part for option in options.items() for part in option))
    assert (status, out) == (0, f"{expected}\n")
    assert "7 host blocks" in out
    assert "prefix cache  off" in run(trace, "--num-blocks", 40, "--no-sharing")[1]


@pytest.mark.parametrize("name", ["code", "agents", "few_shot"])
def test_requests_are_drawn_from_a_model_by_name(run, name):
    expected = simulate(workload_named(name).sample(6, rate=50.0, seed=3), simulation_config(num_blocks=2000))
    options = ["--requests", 6, "--rate", 50, "--seed", 3]
    assert run(name, *options, "--num-blocks", 2000) == (0, f"{expected}\n", "")


def test_a_file_that_has_a_models_name_is_meant_by_its_path(run, trace, monkeypatch):
    monkeypatch.chdir(trace.parent)
    trace.rename("chat")
    assert run("./chat", "--num-blocks", 20)[1].startswith("trace         chat\n")
    assert "3 of 3 completed" in run("./chat", "--num-blocks", 20)[1]


def test_a_trace_whose_requests_come_at_once_is_given_arrivals(run, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "10,5\n" * 40)
    drawn = read_trace(path).with_poisson_arrivals(2.0, seed=5)
    expected = simulate(drawn, simulation_config(num_blocks=50))
    assert run(path, "--num-blocks", 50, "--rate", 2, "--seed", 5)[1] == f"{expected}\n"


def test_blocks_of_a_jsonl_file_are_as_long_as_asked(run, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("[0, 40, 5, [1, 2, 3]]\n[9, 40, 5, [1, 2, 4]]\n")
    status, out, _ = run(path, "--num-blocks", 50, "--block-size", 16, "--segment-size", 16)
    assert status == 0
    assert "40.0% of prompt tokens found (32)" in out
    status, _, err = run(path, "--num-blocks", 50)
    assert (status, "a prompt of 40 tokens has 1 blocks of 512; got 3" in err) == (1, True)


# Costs.


def test_measured_costs_come_from_a_file_and_bring_the_size_of_a_step(run, trace, tmp_path):
    buckets = [Bucket(kind="decode", tokens=2, rows=2), Bucket(kind="mixed", tokens=64, rows=2)]
    cost = LinearCost(buckets=dict.fromkeys(buckets, 1.0), token=0.01, padded_token=0.1)
    path = tmp_path / "cost.json"
    path.write_text(cost.to_json())
    config = simulation_config(num_blocks=20, max_batch_tokens=64, max_requests_per_batch=2)
    expected = simulate(read_trace(trace), config, cost=cost)
    assert run(trace, "--num-blocks", 20, "--cost", path) == (0, f"{expected}\n", "")
    status, out, err = run(trace, "--num-blocks", 20, "--cost", path, "--rows", 4)
    assert (status, out == f"{expected}\n") == (0, False)
    assert err == f"cbjax: note: {path} has no measured seconds for decode(4), mixed(64 tokens, 4 rows); estimated " \
        "from the others' sizes"  # fmt: skip


def test_a_data_sheet_and_a_models_size_change_the_times(run, trace):
    speeds = [
        next(line for line in run(trace, "--num-blocks", 20, *options)[1].splitlines() if line.startswith("latency"))
        for options in ([], ["--hardware", "tpu_v5e"], ["--parameters", 70], ["--kv-bytes", 1e7])
    ]
    assert len(set(speeds)) == 4
    assert run(trace, "--num-blocks", 20, "--hardware", "h100", "--parameters", 8.03, "--kv-bytes", 131072)[1] == run(
        trace, "--num-blocks", 20
    )[1]  # fmt: skip


# Sweeps.


def test_several_values_make_a_sweep_of_all_combinations(run, trace):
    vary = {"eviction": ["lru", "lifo"], "safety_margin": [0.0, 0.5], "num_blocks": [8, 16]}
    expected = run_sweep(read_trace(trace), simulation_config(num_blocks=8), vary)
    lists = ("--eviction", "lru", "lifo", "--margin", 0, 0.5, 0, "--num-blocks", 8, 16)
    assert run(trace, *lists) == (0, f"{expected}\n", "")
    assert len(str(expected).splitlines()) == 9
    margins = run_sweep(read_trace(trace), simulation_config(num_blocks=8), {"safety_margin": [0.0, 0.5]})
    assert run(trace, "--margin", 0, 0.5, "--num-blocks", 8, 8)[1] == f"{margins}\n"


def test_a_pool_of_a_sweep_that_holds_no_request_is_a_line_and_all_such_are_an_error(run, trace):
    status, out, err = run(trace, "--num-blocks", 1, 16)
    assert (status, err) == (0, "")
    assert "no request fits the pool" in out.splitlines()[1]
    status, out, err = run(trace, "--num-blocks", 1, "--margin", 0, 0.1)
    assert status == 1
    assert out.count("no request fits the pool") == 2
    assert err == "cbjax: no request of the trace fits any of these pools; raise --num-blocks"


# Pictures and JSON.


@pytest.mark.parametrize("pools", [[20], [20, 30]])
def test_a_picture_and_a_json_file_are_written(run, trace, tmp_path, pools):
    picture, file = tmp_path / "out.png", tmp_path / "out.json"
    status, out, err = run(trace, "--num-blocks", *pools, "--plot", picture, "--json", file)
    assert (status, err) == (0, f"picture: {picture}")
    assert picture.read_bytes()[:4] == PNG
    document = json.loads(file.read_text())
    assert document["settings"]["num_blocks"] == pools
    assert document["settings"]["plot"] == str(picture)
    one = document["simulated"] if len(pools) == 1 else document["simulated"]["points"][0]["result"]
    assert one == simulate(read_trace(trace), simulation_config(num_blocks=20)).to_dict()
    assert out.strip()


def test_policies_alone_make_a_picture_too(run, trace, tmp_path):
    names = sorted(EVICTION_MAPPING)
    assert run(trace, "--num-blocks", 20, "--eviction", *names, "--plot", tmp_path / "out.svg")[0] == 0
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_json_on_standard_output_stands_there_alone(run, trace):
    status, out, err = run(trace, "--num-blocks", 20, "--json", "-")
    assert status == 0
    assert json.loads(out)["simulated"]["completed"] == 3
    assert "3 of 3 completed" in err


# Errors.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arrival_s,prompt_tokens\n0,5\n", "line 1: the header of a trace names the columns"),
        ("prompt_tokens,output_tokens\n5,-2\n", "line 2: output_tokens must be at least 1"),
        (CSV + "0.1,5,5\n", "line 5: arrivals must be ascending"),
        ("prompt_tokens,output_tokens\n", "a trace has at least one request"),
        ("prompt_tokens,output_tokens\n5,many\n", "line 2: output_tokens must be a whole number; got 'many'"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(run, tmp_path, content, message):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    status, out, err = run(path, "--num-blocks", 20)
    assert (status, out) == (1, "")
    assert err.startswith(f"cbjax: {path}")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_pool_that_cannot_hold_one_request_is_an_error_with_both_numbers(run, trace):
    status, out, err = run(trace, "--num-blocks", 1)
    assert (status, out) == (1, "")
    assert "cbjax: the pool cannot hold one request of the trace: one can have 64 KV cells" in err
    assert "the smallest of 3 needs 93, which is 2 blocks; raise num_blocks" in err


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--plot", "no/such/place.png"], 1, "--plot no/such/place.png: its folder does not exist"),
        (["--plot", "."], 1, "--plot .: that is a folder"),
        (["--plot", "picture.doc"], 1, "--plot picture.doc: a picture's name ends with one of "),
        (["--plot", "picture"], 1, "--plot picture: a picture's name ends with one of "),
        (["--json", "no/such/out.json"], 1, "--json no/such/out.json: its folder does not exist"),
        (["--cost", "no/such/cost.json"], 1, "no/such/cost.json"),
        (["--cost", str(ROOT / "README.md")], 1, "README.md: a cost model is JSON"),
        (["--cost", "x", "--hardware", "a100", "--kv-bytes", "9"], 2, "leave --hardware and --kv-bytes without effect"),
        (["--eviction", "newest"], 2, "--eviction is one of "),
        (["--margin", "0", "7"], 1, "safety_margin must be in [0, 1]; got 7.0"),
        (["--margin", "nan"], 1, "safety_margin must be in [0, 1]; got nan"),
        (["--num-blocks", "20", "0"], 1, "num_blocks must be at least 1; got 0"),
        (["--block-size", "2"], 1, "block_size must be at least 4"),
        (["--rows", "0"], 1, "max_requests_per_batch must be at least 1"),
        (["--max-batch-tokens", "-1"], 1, "max_batch_tokens must be at least 1"),
        (["--offload", "-1"], 1, "host_blocks must be at least 0"),
        (["--rate", "0"], 1, "rate must be a positive number"),
        (["--requests", "0"], 1, "must be at least 1; got 0"),
        (["--seed", "-1"], 1, "--seed must be at least 0; got -1"),
        (["--parameters", "0"], 1, "must be a positive number"),
        (["--segment-size", "4"], 2, "--segment-size is of a .jsonl file; chat is a workload model"),
        (["--num-blocks", "20", "30", "--processes", "0"], 1, "processes must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_runs(run, monkeypatch, options, status, message):
    def run_one(*args):
        pytest.fail("a simulation runs")

    monkeypatch.setattr("cbjax.simulate.run.Simulation.step", run_one)
    found, out, err = run("chat", "--num-blocks", 200, *options)
    assert (found, out, len(err.splitlines())) == (status, "", 1)
    assert err.startswith("cbjax: ")
    assert message in err


def test_neither_a_file_nor_a_model_is_bad_usage_that_names_the_models(run):
    status, out, err = run("chatt", "--num-blocks", 20)
    assert (status, out) == (2, "")
    assert err == (
        "cbjax: 'chatt' is neither a trace, which is a file, nor a workload model, which are agents, chat, code, "
        "few_shot, reasoning"
    )


def test_a_picture_without_matplotlib_is_refused_before_the_run(run, trace, tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **settings):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *args, **settings)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    status, out, err = run(trace, "--num-blocks", 20, "--plot", tmp_path / "out.png")
    assert (status, out, err) == (1, "", "cbjax: --plot needs matplotlib: pip install cbjax[plot]")


def test_a_place_that_cannot_be_written_is_refused_before_the_run(run, trace, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for option in ("--plot", "--json"):
        status, out, err = run(trace, "--num-blocks", 20, option, trace.parent / "new.png")
        assert (status, out) == (1, "")
        assert "it cannot be written there; choose another place" in err


@pytest.mark.parametrize(
    "arguments", [["chat"], ["--num-blocks", "4"], ["chat", "--num-blocks", "4", "--scheduler", "x"]]
)
def test_bad_usage_ends_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *arguments])
    assert ended.value.code == 2
    assert "usage: cbjax simulate" in capsys.readouterr().err


def test_neither_jax_nor_matplotlib_is_imported_for_a_table(trace):
    code = (
        "import sys, cbjax.cli\n"
        f"status = cbjax.cli.main(['simulate', {str(trace)!r}, '--num-blocks', '20', '40', '--margin', '0', '0.2'])\n"
        "sys.exit(status or 3 * bool({'jax', 'flax', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 5


def test_help_names_every_option():
    result = subprocess.run([sys.executable, "-m", "cbjax", "simulate", "--help"], check=True, capture_output=True,
        text=True, cwd=ROOT)  # fmt: skip
    for option in ("--num-blocks", "--margin", "--eviction", "--offload", "--cost", "--plot", "--json", "--rate"):
        assert option in result.stdout
