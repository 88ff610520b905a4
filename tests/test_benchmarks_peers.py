"""Benchmarks against other engines: their protocol, with a fake peer and a fake llama.cpp."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from benchmark_fixtures import BUDGET, TINY

from benchmarks import llama_cpp, peer, pressure, report, sides, vs_transformers
from benchmarks.peer import Peer, PeerError

FAKE_PEER = """
import json, sys
mode, job = sys.argv[1], json.load(open(sys.argv[2]))
print(json.dumps({"versions": {"torch": "0", "transformers": "0"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [[len(prompt)] * asked["new_tokens"] for prompt in job["prompts"][: asked["count"]]]
    print(json.dumps({"seconds": 2.0, "tokens": tokens}), flush=True)
"""


@pytest.fixture
def fake_peer(tmp_path, monkeypatch):
    """Replaces the peer's script by this source."""

    def replace(source=FAKE_PEER):
        script = tmp_path / "fake_peer.py"
        script.write_text(source)
        monkeypatch.setattr(peer, "SCRIPT", script)

    return replace


def test_vs_transformers_without_a_peer_measures_cbjax(measured, model):
    document = measured(vs_transformers.main, *TINY, *BUDGET, "--only", "cbjax", "--model", model)
    assert document["figures"].keys() == {"float32, 2 requests, cbjax"}


def test_vs_transformers_takes_turns_with_both_peers(measured, model, fake_peer):
    fake_peer()
    document = measured(vs_transformers.main, *TINY, *BUDGET, "--peer-python", sys.executable, "--model", model)
    figures = document["figures"]
    for name in (sides.BATCHED, sides.PADDED):
        assert figures[f"float32, 2 requests, {name}"]["values"] == [2 * 8 / 2.0]
        assert figures[f"float32, 2 requests, requests equal to {name}"]["median"] == 0
        assert figures[f"float32, 2 requests, cbjax against {name}"]["median"] > 0
    assert document["versions"]["transformers"] == "0"


@pytest.fixture
def fake_llama_cpp(tmp_path):
    """A folder with programs that say what they were asked, in the form of the real ones."""
    programs = tmp_path / "llama"
    programs.mkdir()
    quantize = 'import shutil, sys; shutil.copy(sys.argv[2], sys.argv[3]); open(sys.argv[3], "a").write(sys.argv[4])'
    bench = """
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if open(asked["--model"]).read() != "weights in BF16":
    sys.exit("no such weights")
print("main: n_kv_max = 8192")
print(json.dumps({"t": float(asked["-npp"]), "pl": asked["-npl"]}))
"""
    for name, source in (("llama-quantize", quantize), ("llama-batched-bench", bench)):
        program = programs / name
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)
    return programs


def test_llama_cpp_runs_prompts_of_the_mean_length_and_times_itself(tmp_path, fake_llama_cpp):
    gguf = tmp_path / "model.gguf"
    gguf.write_text("weights in ")
    job = sides.Job(
        model="", dtype="bfloat16", threads=2, block_size=4, max_batch_tokens=8, num_blocks=0,
        prompts=[[0] * 10, [0] * 31, [0] * 900],
    )  # fmt: skip
    side = llama_cpp.LlamaCpp(fake_llama_cpp, gguf, job)
    run = side.run(2, 5)
    assert (run.seconds, run.tokens_per_second) == (20.0, 2 * 5 / 20.0)
    model = side._model
    model.write_text("something else")
    with pytest.raises(PeerError, match="exit code 1; it said: no such weights"):
        side.run(2, 5)
    side.close()
    assert not model.exists()


def test_llama_cpp_wants_a_gguf_file(capsys):
    with pytest.raises(SystemExit):
        vs_transformers.main(["--quick", "--only", "cbjax", "--llama-cpp", "there", "--model", "some/folder"])
    assert "llama.cpp reads GGUF files" in capsys.readouterr().err


def test_a_limit_of_vs_transformers_is_one_of_its_figures():
    figures = {f"float32, 64 requests, cbjax against {sides.BATCHED}": report.spread([3.0, 5.5, 6.0], "ratio")}
    (limit,) = vs_transformers.limits_of(figures).values()
    assert limit == {"rule": "at least", "bound": 5.0, "holds": True}


def test_vs_transformers_wants_to_know_its_peer(capsys):
    with pytest.raises(SystemExit):
        vs_transformers.main(["--quick"])
    assert "--setup-peer" in capsys.readouterr().err


def test_the_pressure_benchmark_evicts_and_compares(measured, model, fake_peer):
    fake_peer()
    document = measured(pressure.main, *TINY, *BUDGET, "--peer-python", sys.executable, "--model", model)
    figures, limits = document["figures"], document["limits"]
    label = "float32, 12% pool of 9 blocks"
    assert document["notes"] == [f"{label}: raised to what the longest request needs"]
    assert figures[f"{label}, {sides.BATCHED}"]["values"] == [4 * 32 / 2.0]
    assert not limits[f"{label}, {sides.BATCHED}, {pressure.EQUAL}"]["holds"]
    for side in (pressure.OFFLOAD, pressure.RESET):
        assert figures[f"{label}, {side}, evictions"]["median"] > 0
        assert limits[f"{label}, {side}, {pressure.EQUAL}"]["holds"]
        assert f"{label}, {side} {pressure.AGAINST}" in limits
    assert figures[f"{label}, {pressure.OFFLOAD}, copied MiB"]["median"] > 0
    assert figures[f"{label}, {pressure.RESET}, recomputed tokens"]["median"] > 0
    assert limits[f"{label}, {pressure.RECOMPUTED}"]["holds"]


def test_a_side_that_cannot_run_is_dropped_and_noted_and_the_others_go_on():
    class Fails:
        def run(self, count, new_tokens):
            raise PeerError("the peer ended; it said: Traceback\nMemoryError: no blocks\n")

    class Works:
        def run(self, count, new_tokens):
            return peer.Run(seconds=1.0, tokens=[[7] * new_tokens] * count)

    notes: list[str] = []
    args = Namespace(repeats=2, requests=3, new_tokens=4)
    runs = pressure.take_turns({"bad": Fails(), "good": Works()}, args, "small pool", notes)
    assert {name: len(own) for name, own in runs.items()} == {"good": 3}
    assert notes == ["small pool, bad: cannot run: MemoryError: no blocks"]


@pytest.mark.parametrize(
    ("percent", "blocks"), [(100, (20, False)), (53, (11, False)), (50, (10, False)), (40, (10, True))]
)
def test_a_pool_is_a_share_of_what_all_requests_need_but_holds_the_longest(percent, blocks):
    job = sides.Job(
        model="", dtype="float32", threads=1, block_size=4, max_batch_tokens=8, num_blocks=0,
        prompts=[[0] * 10, [0] * 30, [0] * 9],
    )  # fmt: skip
    assert pressure.pool_blocks(job, 8, percent) == blocks


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit('no torch here')", r"exit code 1; it said: no torch here"),
        (FAKE_PEER.replace('asked["new_tokens"] for', "2 for"), r"generated \[2, 2\] tokens for 2 x 3"),
        (FAKE_PEER.replace("asked = json.loads(line)", "sys.exit(5)"), r"exit code 5"),
    ],
)
def test_a_peer_that_fails_is_an_error_that_quotes_it(tmp_path, fake_peer, source, message):
    fake_peer(source)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"prompts": [[1], [2]]}))
    with pytest.raises(PeerError, match=message):
        Peer(Path(sys.executable), "generate", job).run(2, 3)


def test_setting_up_the_peer_makes_an_environment_once_and_installs_its_libraries(tmp_path, monkeypatch):
    commands, made = [], []

    def create(folder, with_pip):
        made.append(with_pip)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    monkeypatch.setattr(peer.venv, "create", create)
    monkeypatch.setattr(peer.subprocess, "run", lambda command, **_: commands.append(command))
    for _ in range(2):
        assert peer.set_up(tmp_path / "env") == tmp_path / "env" / "bin" / "python"
    assert made == [True]
    assert commands[0][-2:] == ["torch==2.13.0", "transformers==5.24.0"]


def test_the_peer_script_imports_nothing_of_ours():
    roots = re.findall(r"^\s*(?:import|from) (\w+)", peer.SCRIPT.read_text(), re.MULTILINE)
    assert {"torch", "transformers"} == set(roots) - sys.stdlib_module_names


def test_agreement_is_the_share_of_requests_that_are_equal_throughout():
    assert vs_transformers.agreement([[1, 2], [3, 4], [5], [6]], [[1, 2], [3, 5], [5], [6]]) == 0.75
