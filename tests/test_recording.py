"""The file: inputs come back as they were, whatever ends the writing; and what is no recording is refused."""

import contextlib
import linecache
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from machines import make_config, make_request
from recorded_runs import random_run
from recordings import INPUTS, REQUEST, answers, assert_same, values, write

from cbjax import __version__
from cbjax.recording import (
    Add,
    LiveScheduler,
    RecordingError,
    RecordingWriter,
    Start,
    Update,
    live,
    read_recording,
    replay,
)
from cbjax.recording.compare import differences
from cbjax.recording.writer import header
from cbjax.scheduler import EVICTION_MAPPING, Request, Scheduler

ROOT = Path(__file__).parent.parent

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.cbjax"


# What is written is read.


def test_inputs_come_back_as_they_were(path):
    recording = read_recording(write(path))
    assert_same(recording.inputs, INPUTS)
    assert (recording.is_complete, recording.num_lost_bytes, recording.notes) == (True, 0, ())
    assert recording.made_by == __version__
    request = recording.inputs[1].request
    assert (request.prompt.dtype, request.words.dtype) == (np.int32, np.uint32)
    assert not request.prompt.flags.writeable


def test_the_comparison_of_these_tests_sees_every_field_of_a_request():
    changed = {
        "uid": 8,
        "prompt": values([0, 255, 256, 70_000, 5]),
        "max_new_tokens": 13,
        "eos_token_ids": (2, 3),
        "words": values([1, 2**32 - 1], np.uint32),
        "namespace": b"\x00salt\xfe",
        "fork_of": None,
    }
    assert changed.keys() == {field.name for field in fields(Request)}
    for name, value in changed.items():
        (found,) = differences(REQUEST, replace(REQUEST, **{name: value}), "request")
        assert found.startswith(f"request.{name}")


def test_ids_take_no_more_bytes_than_the_largest_needs(path):
    sizes = []
    for largest in (255, 256, 65_536):
        request = replace(REQUEST, prompt=values([largest] * 3000))
        sizes.append(write(path, [INPUTS[0], Add(request=request)]).stat().st_size)
    assert [after - before for before, after in pairwise(sizes)] == [4000, 4000]


def test_a_file_says_nothing_of_where_it_was_made(path):
    write(path)
    content = path.read_bytes()
    assert str(path.parent).encode() not in content
    assert str(ROOT).encode() not in content


# Whatever ends the writing.


def test_every_record_before_a_cut_is_read_wherever_it_is(path):
    content = write(path).read_bytes()
    lines = content.splitlines(keepends=True)
    for cut in range(len(header()), len(content), 3):
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n") - 1
        recording = read_recording(path)
        assert_same(recording.inputs, INPUTS[:whole])
        assert not recording.is_complete
        assert recording.num_lost_bytes == cut - len(b"".join(lines[: whole + 1]))
        assert f"was not closed: it has {whole} complete records" in recording.notes[0]
    for cut in range(len(header())):
        path.write_bytes(content[:cut])
        with pytest.raises(RecordingError, match="is no recording" if cut else "is empty"):
            read_recording(path)


def test_a_killed_process_leaves_all_that_it_had_done(path):
    code = """
        import os, signal, sys
        sys.path.insert(0, "tests")
        from recorded_runs import random_run
        from cbjax.recording import RecordingWriter, Start
        writer, count = RecordingWriter(sys.argv[1]), 0
        def journal(given):
            global count
            writer(given)
            count += 1
            if count == 40:
                print(count, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        random_run(1, journal)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    killed = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "40\n"), killed.stderr
    recording = read_recording(path)
    assert (len(recording.inputs), recording.is_complete) == (40, False)
    assert len(list(replay(recording))) > 5


def test_an_interrupt_at_any_moment_leaves_a_recording_that_replays(path):
    """Between any two lines of Python, as Ctrl-C comes; the engine is reset after it, as after every interrupt."""
    for moment in range(0, 2000, 19):
        writer = RecordingWriter(path)
        scheduler = LiveScheduler(make_config())
        with contextlib.suppress(KeyboardInterrupt), interrupt_after(moment):
            scheduler.record(writer)
            for uid in range(3):
                scheduler.add(make_request(uid, 5, 2))
                scheduler.schedule()
            scheduler.cancel(1)
        scheduler.record(writer) if scheduler.journal is None and scheduler.state.is_idle else scheduler.reset()
        scheduler.add(make_request(9, 5, 2))
        plan = scheduler.schedule()
        writer.close()
        *_, last = replay(path)
        assert list(differences(last.plan, plan, "plan")) == []


@contextlib.contextmanager
def interrupt_after(lines):
    """Raises KeyboardInterrupt when the package has run so many lines."""
    left = lines

    def trace(frame, event, arg):
        nonlocal left
        if "/cbjax/recording/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        # The line of a `with` comes again at its end, where the interpreter itself lets no signal in.
        if left < 0 and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with "):
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_full_disk_ends_the_recording_and_not_the_run(caplog):
    writer = RecordingWriter("/dev/full")
    run = random_run(2, writer)
    writer.close()
    assert run.num_ended("length") > 0
    (record,) = caplog.records
    assert "the recording /dev/full ends early, and the run goes on" in record.message
    assert os.strerror(28) in record.message


def test_what_comes_after_the_end_is_dropped(path):
    write(path)
    writer = RecordingWriter(path)
    writer(INPUTS[0])
    writer.close()
    writer(INPUTS[1])
    writer.close()
    assert_same(read_recording(path).inputs, INPUTS[:1])


# What cannot be recorded.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eviction": replace(EVICTION_MAPPING["lru"], name="mine")}, "eviction 'mine' cannot be recorded"),
        (
            {"eviction": replace(EVICTION_MAPPING["lru"], take=lambda order, count, room: [])},
            "eviction 'lru' cannot be recorded",
        ),
        ({"block_hash": lambda content: content[:16]}, "block_hash .* cannot be recorded"),
    ],
)
def test_a_config_that_no_name_stands_for_is_refused_and_runs_unrecorded(path, changes, message):
    writer, scheduler = RecordingWriter(path), LiveScheduler(make_config(**changes))
    with pytest.raises(ValueError, match=message):
        scheduler.record(writer)
    scheduler.add(make_request(0, 5, 2))
    assert scheduler.schedule().batch.num_rows == 1
    writer.close()
    assert read_recording(path).inputs == ()


def test_a_policy_of_ones_own_is_refused(path):
    policy = Scheduler(name="fifo", active_order=("prefill", "decode"), default_safety_margin=0.0)
    writer, scheduler = RecordingWriter(path), LiveScheduler(replace(make_config(), policy=policy))
    with pytest.raises(ValueError, match="policy 'fifo' cannot be recorded: it is not the one of that name"):
        scheduler.record(writer)
    writer.close()


# Recording.


def test_a_recording_begins_idle_and_with_an_empty_cache():
    scheduler, told = LiveScheduler(make_config(shares_blocks=True)), []
    request = make_request(0, 12, 1)
    scheduler.add(request)
    with pytest.raises(RuntimeError, match="begins with an idle engine"):
        scheduler.record(told.append)
    scheduler.update(scheduler.schedule(), answers([1]))
    assert scheduler.num_cached(request) == 8
    journal = told.append
    scheduler.record(journal)
    assert scheduler.num_cached(request) == 0
    scheduler.record(journal)
    assert [type(given) for given in told] == [Start]


def test_nobody_pays_for_a_recording_that_nobody_makes(monkeypatch):
    monkeypatch.setattr(live, "plan_digest", lambda plan: pytest.fail("a digest is made"))
    for name in ("Add", "Cancel", "Schedule", "Update", "Renew", "Reset"):
        monkeypatch.setattr(live, name, lambda **fields: pytest.fail("an input is made"))
    assert random_run(3, None).steps


def test_a_refused_request_is_not_recorded():
    scheduler, told = LiveScheduler(make_config(num_blocks=2)), []
    scheduler.record(told.append)
    with pytest.raises(ValueError, match="must fit the KV pool"):
        scheduler.add(make_request(0, 50, 50))
    assert [type(given) for given in told] == [Start]


def test_what_a_row_answers_that_does_not_emit_is_not_recorded():
    scheduler, told = LiveScheduler(make_config(max_batch_tokens=4)), []
    scheduler.record(told.append)
    scheduler.add(make_request(0, 6, 2))
    for token in (123, 45):
        scheduler.update(scheduler.schedule(), answers([token]))
    assert [given.tokens.tolist() for given in told if isinstance(given, Update)] == [[0], [45]]
