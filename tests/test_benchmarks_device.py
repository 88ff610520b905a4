"""The check of a GPU, without one: its parts run on tiny sizes, and a part that fails or hangs stops nothing."""

import json
import os
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report
from benchmarks.device import bandwidth, check, child, command_buffer, decodes, engine, kernels, prefill, timing, trace
from benchmarks.device.ahead import Ahead
from benchmarks.device.batches import Case, differences, make_batch
from benchmarks.device.check import Part, run_part
from benchmarks.device.models import TINY, random_model
from benchmarks.device.state import Found, LeftOutError, State, Step

ROOT = Path(__file__).parent.parent
DRY = Namespace(dry_run=True, attention=None, peer_python=sys.executable)


def _run(part, path, names=None):
    """The steps of a part, or those of these names, in this process."""
    state = State(path)
    steps = [step for step in part.steps(DRY) if names is None or step.name in names]
    assert child.run_steps(steps, state, seconds=300)
    assert {name: step.get("error") for name, step in state.steps.items()} == dict.fromkeys(state.steps)
    assert json.loads(path.read_text())["steps"] == state.steps
    return state.steps


def test_the_kernels_are_held_against_the_reference(tmp_path):
    (found,) = _run(kernels, tmp_path / "state.json", {"mixed, all of it"}).values()
    assert 0 < found["figures"]["error"]["median"] < kernels.BOUND
    assert all(limit["holds"] for limit in found["limits"].values())


def test_a_wrong_answer_is_seen_wherever_it_is():
    case = Case(rows=((40, 1), (20, 5)), kv_heads=1, group=2, head_dim=64, block_size=16)
    batch = make_batch(case)
    written, wrong = batch.kv.copy(), {}
    table, slot, q_start, context_len, _ = batch.step
    for row, (context, count) in enumerate(case.rows):
        for index in range(count):
            block, offset = divmod(context - count + index, case.block_size)
            token = q_start[row] + index
            written[:, :, table[slot[row], block], offset] = batch.k[token], batch.v[token]
    assert (context_len > 0).all()
    from pallas_kernels.paged_attention.reference import paged_attention as reference

    out, _ = reference(batch.q, batch.k, batch.v, batch.kv, *batch.step)
    assert differences(batch, out, written) == (pytest.approx(0, abs=4e-3), 0, True)
    wrong["outputs"] = (out + np.asarray(0.25, out.dtype), written)
    moved, nobody = written.copy(), written.copy()
    moved[:, :, table[slot[0], 2], 7] += np.asarray(0.25, out.dtype)
    nobody[0, 0, min(set(range(written.shape[2] - 2)) - batch.owned), 0] = 1
    error, off, is_left = differences(batch, *wrong["outputs"])
    assert error > kernels.BOUND
    assert (off, is_left) == (0, True)
    assert differences(batch, out, moved)[1] > 1
    assert differences(batch, out, nobody)[2] is False
    holes = out.copy()
    holes[0] = np.nan
    assert differences(batch, holes, written)[0] == np.inf


def test_every_feature_has_a_case_whose_arrays_can_be_made():
    cases = kernels.cases()
    assert {(case.head_dim, case.block_size) for case in cases.values()} >= {
        (width, size) for width in (64, 128, 256) for size in (16, 64, 256)
    }
    for field in ("window", "soft_cap", "sinks", "fp8", "span"):
        assert {case.single for case in cases.values() if getattr(case, field)} == {True, False}
    assert {case.group for case in cases.values()} == {1, 4, 8}
    assert all(np.isnan(make_batch(case).kv.astype(np.float32)).any() for case in cases.values())


def test_bandwidth_is_told_as_a_share_of_what_the_card_copies(tmp_path):
    name = "2 rows of 64 tokens, blocks of 16"
    found = _run(bandwidth, tmp_path / "state.json", {bandwidth.RATES, name})
    copy, figures = found[bandwidth.RATES]["values"]["copy GB/s"], found[name]["figures"]
    gigabytes = 2 * 64 * 2 * 64 * 2 / 1e9
    assert found[name]["values"] == {"sets": 2, "GB read by a call": gigabytes}
    call = figures["a call"]["values"][0]
    assert figures["rate"]["values"][0] == pytest.approx(gigabytes / (call * 1e-6))
    assert figures["of the copy's rate"]["values"][0] == pytest.approx(figures["rate"]["values"][0] / copy)
    assert figures["a call, one a dispatch"]["median"] > 0


def test_a_batch_that_is_too_large_for_the_memory_is_left_out(tmp_path):
    bench = bandwidth.Bench(bandwidth.TINY, None)
    bench._pool_tokens = 64
    state = State(tmp_path / "state.json")
    state.data["steps"][bandwidth.RATES] = {"status": "ok", "values": {"copy GB/s": 1.0}}
    with pytest.raises(LeftOutError, match="2 rows of 128 tokens need 16 blocks; there are 4"):
        bench.measure(2, 128, 16, state)


def test_the_calls_of_a_dispatch_read_different_parts_of_the_store():
    shape = decodes.Shape(rows=2, block_size=16, longest=64, calls=3, heads=2, kv_heads=1, head_dim=64)
    table, contexts, sets, set_blocks = decodes.arguments(shape, 32, 160)
    assert (sets, set_blocks, contexts.tolist()) == (2, 4, [32, 32])
    assert sorted(table[:2, :2].flat) == [0, 1, 2, 3]
    store = decodes.random_store(shape.layout(160))
    assert store.shape == (12, 2, 16, 64)
    assert float(jnp.std(store.astype(jnp.float32))) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_prefill_is_told_as_a_share_of_what_the_card_multiplies(tmp_path):
    found = _run(prefill, tmp_path / "state.json")
    (name,) = set(found) - {prefill.RATE}
    pairs = sum(range(64 - 40 + 1, 64 + 1))
    assert found[name]["values"]["TFLOP of a call"] == pytest.approx(4 * pairs * 2 * 64 / 1e12)


def test_the_operations_of_prefill_are_those_of_what_each_token_sees():
    case = prefill.Prefill(rows=3, new=5, context=9, heads=2, head_dim=64)
    assert case.flops == 3 * 4 * (5 + 6 + 7 + 8 + 9) * 2 * 64


@pytest.mark.slow
def test_the_engine_part_says_what_it_ran_and_that_the_peer_is_not_there(tmp_path):
    state = State(tmp_path / "state.json")
    assert child.run_steps(engine.steps(DRY), state, seconds=300)
    ours, peer, traced = (state.steps[name] for name in (engine.OURS, engine.PEER, engine.TRACED))
    assert ours["values"]["decisions"]["attn_implementation"]["used"] == "xla"
    assert ours["values"]["tokens/s"].keys() == set(engine.MODES)
    assert peer["status"] in ("ok", "left out")
    assert all("timeline" in by for by in traced["values"]["by"].values())
    assert {f"{mode}, device-active" for mode in engine.MODES} <= traced["figures"].keys()


@pytest.mark.slow
def test_the_command_buffer_part_compiles_a_decode_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    state = State(tmp_path / "state.json")
    assert child.run_steps(command_buffer.steps(DRY), state, seconds=300)
    default, portable = state.steps.values()
    assert default["values"] == {"attn_implementation": "xla", "command buffers in the HLO": 0}
    assert portable["status"] == "left out"
    assert "the same as 'decode step of 2 rows, attention by default'" in portable["error"]


THUNKS = """\
000: kCommandBuffer [source       | next=009 (1)]
    001: kCustomKernel [source       | next=002 (1)] input_fusion grid: [1, 1, 1]
    005: kCopy         [source       | next=006 (1)] kCopy
009: kWhile         [prev=000 (1) | next=015 (1)]
condition:
    010: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        021: kCustomKernel [source       | next=023 (2)] loop_add_fusion_2 grid: [1, 1, 1]
        023: kCustomCall   [prev=022 (1) | next=026 (3)] kCustomCall
    024: kGemm [source | sink]
1015: kCustomKernel  [prev=009 (1) | next=018 (3)] loop_gather_fusion grid: [2, 1, 1]
"""


def test_what_a_program_launches_is_read_from_its_sequence_of_thunks(tmp_path):
    thunks = command_buffer.read_thunks(THUNKS)
    assert (thunks.buffers, thunks.loops) == (2, {"kWhile": 1})
    assert thunks.inside == {"kCustomKernel": 2, "kCopy": 1, "kCustomCall": 1}
    assert thunks.outside == {"kCustomKernel": 2, "kGemm": 1}
    assert thunks.share == 4 / 7
    folder = command_buffer.dump_folder(f"--a=b --xla_dump_to={tmp_path} --c")
    assert folder == tmp_path
    with pytest.raises(LeftOutError, match="no sequence of thunks"):
        command_buffer.newest_thunks(folder, [])
    (tmp_path / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert command_buffer.newest_thunks(folder, []) == thunks


def _line(name, *events):
    events = [SimpleNamespace(name=n, start_ns=begin, duration_ns=end - begin) for n, begin, end in events]
    return SimpleNamespace(name=name, events=events)


def test_a_trace_counts_what_runs_at_the_same_time_once():
    streams = [_line("Stream #1", ("a", 100, 200), ("b", 150, 300)), _line("Stream #2", ("a", 400, 450))]
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=[*streams, _line("XLA Ops", ("a", 0, 1000))]),
        SimpleNamespace(name="/host:CPU", lines=[_line("Stream of the host", ("x", 0, 5000))]),
    ]
    found = trace.read_trace(SimpleNamespace(planes=planes), wall=1e-6)
    assert found.busy == pytest.approx(250e-9)
    assert found.span == pytest.approx(350e-9)
    assert found.counts == {"a": 2, "b": 1}
    assert found.seconds_in("a") == pytest.approx(150e-9)
    assert trace.read_trace(SimpleNamespace(planes=planes[1:]), wall=1.0) is None


def test_a_call_is_traced_where_there_is_no_gpu_and_nothing_is_seen():
    assert trace.traced(lambda: jnp.ones(3).block_until_ready()) is None


def test_the_first_call_is_not_counted_and_each_takes_what_the_one_before_gave():
    seconds, last = timing.seconds_of(lambda x: x + 1, jnp.float32(0), 3)
    assert (len(seconds), float(last)) == (3, 4)
    assert timing.rates([0.5, 0.25], 2.0, "GB/s")["values"] == [4.0, 8.0]


def test_programs_are_made_ahead_and_one_that_cannot_be_raises_in_its_turn():
    def bad():
        raise ValueError("no such form")

    good = jax.jit(lambda x: x + 1)
    programs = Ahead({"first": lambda: good.lower(1.0), "bad": bad, "last": lambda: good.lower(1)})
    assert programs.get("first")(1.0) == 2.0
    with pytest.raises(ValueError, match="no such form"):
        programs.get("bad")
    assert programs.get("last")(1) == 2


def test_a_random_model_is_as_wide_as_asked_for_and_none_of_its_arrays_are_equal():
    lm = random_model(TINY, "bfloat16")
    assert lm.config == TINY
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(lm.params) if leaf.ndim > 1]
    assert len({leaf.tobytes() for leaf in leaves}) == len(leaves)
    assert all(abs(leaf.std() - 0.02) < 0.003 for leaf in leaves)


def test_a_step_that_fails_or_is_left_out_stops_nothing_and_what_is_done_is_not_done_again(tmp_path):
    def fail(_):
        raise RuntimeError("no such kernel")

    def leave(state):
        return Found(values={"twice": 2 * state.value("missing", "x")})

    state = State(tmp_path / "state.json")
    figures = {"x": report.spread([1.0], "s")}
    steps = [
        Step(name="bad", run=fail),
        Step(name="needs", run=leave),
        Step(name="good", run=lambda _: Found(figures=figures, notes=("said once",))),
    ]
    assert child.run_steps(steps, state, 60)
    again = State(tmp_path / "state.json")
    assert {name: step["status"] for name, step in again.steps.items()} == {
        "bad": "failed", "needs": "left out", "good": "ok",
    }  # fmt: skip
    assert again.steps["bad"]["error"] == "RuntimeError: no such kernel"
    assert again.data["notes"] == ["said once"]
    assert child.run_steps([*steps, Step(name="late", run=fail)], again, seconds=0.0)
    assert again.steps["late"]["status"] == "left out"
    assert child.answers()


HANGS = """
import os, time
from benchmarks.device.state import Found, Step
from benchmarks import report

def found(state):
    return Found(figures={"x": report.spread([2.0], "s")})

def hang(state):
    state.so_far("hangs", found(state))
    time.sleep(60)

def end(state):
    print("a fault of the card", flush=True)
    os._exit(7)

def steps(args):
    assert args.dry_run
    runs = {"first": found, "hangs": hang, "ends": end, "last": found}
    return [Step(name=name, run=run, seconds=1.0) for name, run in runs.items()]
"""


def test_a_part_that_hangs_or_dies_goes_on_with_its_next_step(tmp_path, monkeypatch):
    package = tmp_path / "faults"
    package.mkdir()
    (package / "hanging.py").write_text(textwrap.dedent(HANGS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    part = Part(name="hanging", seconds=60, package="faults")
    start = time.monotonic()
    found = run_part(part, tmp_path / "folder", 60, ["--dry-run"])
    assert time.monotonic() - start < 50
    steps = found["steps"]
    assert [steps[name]["status"] for name in ("first", "hangs", "ends", "last")] == ["ok", "failed", "failed", "ok"]
    assert "its step's time was over (1 s)" in steps["hangs"]["error"]
    assert steps["hangs"]["figures"]["x"]["median"] == 2.0
    assert "ended with code 7; it said: a fault of the card" in steps["ends"]["error"]
    assert found["status"] == "failed"
    made = check.document([], check.parse(["--only", "kernels"]), {"hanging": found})
    assert made["figures"].keys() == {f"hanging: {name}: x" for name in ("first", "hangs", "last")}
    assert len(made["notes"]) == 2
    missing = run_part(Part(name="missing", seconds=9, package="faults"), tmp_path / "other", 9, [])
    assert missing["status"] == "failed"
    assert "No module named 'faults.missing'" in missing["error"]


@pytest.mark.slow
def test_without_a_gpu_the_check_says_so_at_once_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert check.main(["--json", str(tmp_path / "check.json")]) == 2
    said = capsys.readouterr().err
    assert "sees no GPU" in said
    assert "[cuda13]" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "seconds"), [("nowhere/check.json", "9"), (".", "9"), ("check.json", "0")])
def test_what_the_check_cannot_do_is_refused_before_it_begins(tmp_path, capsys, file, seconds):
    with pytest.raises(SystemExit):
        check.parse(["--dry-run", "--json", str(tmp_path / file), "--seconds", seconds])
    assert "must" in capsys.readouterr().err


def test_the_script_runs_to_its_end_without_a_gpu(tmp_path):
    file = tmp_path / "check.json"
    command = ["bash", str(ROOT / "benchmarks/device/gpu_check.sh"), "--dry-run", "--json", str(file)]
    environment = os.environ | {"PYTHON": sys.executable}
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=400
    )
    made = json.loads(file.read_text())
    assert list(made["parts"]) == [part.name for part in check.PARTS]
    assert {name: part["status"] for name, part in made["parts"].items()} == dict.fromkeys(made["parts"], "ok")
    assert all(limit["holds"] for limit in made["limits"].values())
    assert made["machine"]["device"] == "cpu"
    assert "kernels: ok, 2 of 2 steps" in run.stdout
