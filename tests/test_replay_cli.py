"""`cbjax generate --record` and `cbjax replay`."""

import subprocess
import sys
from pathlib import Path

import pytest
from recordings import recorded, without, write

from cbjax import cli
from cbjax.recording import Cancel, read_recording, replay

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path):
    """The recording of a random run."""
    return write(tmp_path / "run.cbjax", recorded(4)[1].inputs)


@pytest.fixture
def run(capsys):
    """Runs `cbjax replay`: exit status, standard output, standard error."""

    def run(*arguments):
        status = cli.main(["replay", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def table(out):
    """The lines of steps, split; and what the summary says, by its labels."""
    lines = out.splitlines()
    steps = [line.split(None, 6) for line in lines if line[:6].strip().isdigit()]
    summary = {line[:14].strip(): line[14:] for line in lines[-6:]}
    return steps, summary


@pytest.mark.parametrize("seed", [4, 7, 10])
def test_every_step_has_a_line_and_the_summary_adds_up(run, tmp_path, seed):
    original, recording = recorded(seed)
    status, out, err = run(write(tmp_path / "run.cbjax", recording.inputs))
    assert (status, err) == (0, "")
    steps, summary = table(out)
    assert len(steps) == len(original.steps)
    for line, step in zip(steps, original.steps, strict=True):
        plan, state = step.plan, step.state
        tokens = [step.prefill_tokens, step.decode_tokens]
        numbers = [plan.batch.num_rows, *tokens, state.pool.num_free, len(state.waiting)]
        assert [int(number) for number in line[1:6]] == numbers
        events = line[6] if len(line) > 6 else ""
        for what, who in (("admitted", plan.admitted), ("soft reset", plan.soft_resets), ("offloaded", plan.offloads)):
            assert (what in events) == bool(who)
            assert not who or f"{what} {who[0].uid}" in events
    assert summary["requests"].startswith(f"{len(original.requests)} submitted, ")
    assert f"{original.num_ended('length')} length" in summary["requests"]
    assert summary["KV pressure"].startswith(f"{original.count('soft_resets')} soft resets, ")
    assert summary["replay"] == "every plan is the recorded one"


def test_quiet_leaves_only_the_summary(run, path):
    assert run(path, "--quiet")[1].splitlines() == run(path)[1].splitlines()[-6:]


def test_a_plan_that_is_not_the_recorded_one_is_named_and_the_status_tells(run, tmp_path):
    recording = next(
        edited
        for seed in range(100)
        for i, given in enumerate(recorded(seed)[1].inputs)
        if isinstance(given, Cancel) and not replays(edited := without(recorded(seed)[1], i))
    )
    status, out, err = run(write(tmp_path / "edited.cbjax", recording.inputs))
    steps, _ = table(out)
    assert status == 1
    assert f"cbjax: step {len(steps)}: the plan is not the recorded one" in err
    assert "every plan" not in out


def replays(recording):
    try:
        return bool(list(replay(recording)))
    except ValueError:
        return False


def test_two_recordings_are_compared(run, path, tmp_path):
    same = write(tmp_path / "same.cbjax", recorded(4)[1].inputs)
    assert run(path, "--diff", same) == (0, "no difference: the same inputs and the same plans\n", "")
    other = write(tmp_path / "other.cbjax", recorded(5)[1].inputs)
    status, out, _ = run(path, "--diff", other)
    assert status == 1
    assert out.startswith("inputs differ first before step 0:\n  start.config.policy: 'fifo' | 'prefill_first'\n")


def test_a_recording_is_written_again_without_its_tokens(run, path, tmp_path):
    status, out, _ = run(path, "--anonymise", tmp_path / "out.cbjax")
    assert status == 0
    assert out == run(path, "--quiet")[1]
    first = [given.request.prompt for given in read_recording(tmp_path / "out.cbjax").inputs[1:2]]
    assert (first[0] >= 2**30).all()
    status, _, err = run(path, "--anonymise", path)
    assert (status, "that is the recording itself" in err) == (1, True)
    assert len(read_recording(path).inputs) == len(recorded(4)[1].inputs)


def test_what_was_cut_is_said_and_shown(run, path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    status, out, err = run(path)
    assert status == 0
    assert len(err.splitlines()) == 1
    assert "cbjax: note: " in err
    assert "was not closed: it has " in err
    assert "bytes of a record that is cut" in err
    assert table(out)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty: nothing was recorded"),
        (b"{}", "is no recording of cbjax"),
        (b'["cbjax recording",7,"9.9"]\n', "format 7, made by cbjax 9.9"),
    ],
)
def test_another_file_is_an_error_of_one_line(run, tmp_path, content, message):
    path = tmp_path / "other"
    if content is not None:
        path.write_bytes(content)
    for arguments in ([path], [path, "--diff", path], [path, "--anonymise", tmp_path / "out"]):
        status, out, err = run(*arguments)
        assert (status, out, len(err.splitlines())) == (1, "", 1)
        assert message in err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    # More than a pipe holds, so that writing on must fail.
    path = write(tmp_path / "long.cbjax", recorded(4)[1].inputs * 60)
    command = f"'{sys.executable}' -m cbjax replay '{path}' | head -n 1"
    result = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == [
        "step",
        "rows",
        "prefill",
        "decode",
        "free",
        "blocks",
        "waiting",
        "what",
        "happened",
    ]


@pytest.mark.parametrize(("place", "message"), [("nowhere/run.cbjax", "its folder does not exist"), ("", "a folder")])
def test_a_place_where_nothing_can_be_recorded_is_said_before_the_model_is_loaded(tmp_path, capsys, place, message):
    assert cli.main(["generate", "x", "--model", "no/such", "--record", str(tmp_path / place)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"cbjax: --record {tmp_path / place}: ")
    assert message in err
