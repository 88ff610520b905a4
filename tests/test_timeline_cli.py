"""`cbjax generate --trace`, run in this process on a tiny model without a tokenizer."""

import errno
import json
from pathlib import Path

import pytest

from cbjax import CausalLM, GenerationConfig, cli

MODEL = Path(__file__).parent / "goldens" / "tiny_llama" / "single"
SMALL = ["--max-new-tokens", "8", "--block-size", "4", "--num-blocks", "64", "--max-batch-tokens", "64"]


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on two prompts: exit status, standard output, standard error."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[5, 9, 31]\n[7]\n")

    def run(*arguments, model=MODEL):
        status = cli.main(["generate", "--model", str(model), "--file", str(prompts), *SMALL, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_trace_is_written_and_shown_as_a_table(run, tmp_path):
    path = tmp_path / "trace.json"
    status, out, err = run("--trace", path)
    assert status == 0
    document = json.loads(path.read_text())
    assert document["otherData"]["steps"] == sum(event["name"] == "update" for event in document["traceEvents"]) == 8
    assert "of wall clock" in err
    assert "perfetto" in err
    assert "wall clock" not in out


def test_an_interrupted_run_has_a_trace(run, tmp_path, monkeypatch):
    def interrupted(lm, inputs, *arguments, **settings):
        next(lm.stream(inputs[0], GenerationConfig(max_new_tokens=8)))
        raise KeyboardInterrupt

    monkeypatch.setattr(CausalLM, "generate_batch", interrupted)
    status, _, err = run("--trace", tmp_path / "trace.json")
    assert status == 130
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["steps"] == 1
    assert "interrupted" in err


def test_a_trace_that_cannot_be_written_is_told_before_the_model_is_loaded(run, tmp_path):
    for path, why in ((tmp_path, "that is a folder"), (tmp_path / "no" / "t.json", "its folder does not exist")):
        status, out, err = run("--trace", path, model="no such model")
        assert (status, out) == (1, "")
        assert err.startswith(f"cbjax: --trace {path}: {why}")


def test_a_disk_that_is_full_in_the_end_takes_no_answer_with_it(run, tmp_path, monkeypatch):
    def full(path, pieces):
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = run()
    monkeypatch.setattr("cbjax.timeline.timeline.write_whole", full)
    monkeypatch.setattr("cbjax.cli.generate.write_whole", full)
    trace, document = tmp_path / "trace.json", tmp_path / "all.json"
    status, out, err = run("--trace", trace, "--json", document)
    assert (status, out) == (1, expected[1])
    assert "of wall clock" in err
    assert "2 finished" in err
    for option, path in (("--trace", trace), ("--json", document)):
        assert f"cbjax: {option} {path} was not written: No space left on device" in err
