"""A timeline of random runs: it agrees with the engine's own records, is bounded, and is a trace that viewers read."""

import json
import stat
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engines import finish, make_engine, submit
from recorded_runs import Run, random_run
from timed_devices import checked_trace, timed_engine

from cbjax import Timeline
from cbjax.paths import check_writable
from cbjax.step_record import PHASES
from cbjax.timeline import STEP

SEEDS = range(12)


def recorded(seed: int, **settings) -> tuple[Run, Timeline]:
    """A run with forks, cancels, aborts, evictions and any depth."""
    timeline = Timeline(**settings)
    return random_run(seed, None, timeline.recorder), timeline


@pytest.fixture(scope="module", params=SEEDS)
def run_and_timeline(request):
    return recorded(request.param)


def trace_of(timeline: Timeline, tmp_path) -> tuple[dict, dict]:
    path = tmp_path / "trace.json"
    timeline.save(path)
    text = path.read_text(encoding="ascii")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    return checked_trace(text), json.loads(text)["otherData"]


# What was recorded.


def test_the_counts_of_each_step_are_those_of_its_record(run_and_timeline):
    run, timeline = run_and_timeline
    steps = timeline.steps
    assert timeline.num_steps == len(steps) == len(run.steps)
    assert timeline.num_dropped == 0
    assert steps["index"].tolist() == list(range(len(steps)))
    for step, record in zip(steps, run.steps, strict=True):
        plan, state = record.plan, record.state
        assert timeline.buckets[step["bucket"]] == str(record.bucket)
        assert (step["rows"], step["starved"]) == (plan.batch.num_rows, plan.num_starved)
        assert (step["prefill_tokens"], step["decode_tokens"]) == (record.prefill_tokens, record.decode_tokens)
        assert step["decode_tokens"] == plan.batch.draws[plan.batch.carried].sum()
        assert step["prefill_tokens"] == plan.batch.count[~plan.batch.carried].sum()
        assert step["blocks"] == state.config.num_blocks - state.pool.num_free
        assert (step["running"], step["waiting"]) == (state.num_active, len(state.waiting))


def test_sums_over_the_run_are_those_of_the_run(run_and_timeline):
    run, timeline = run_and_timeline
    steps, stats = timeline.steps, run.engine.stats
    for field in ("soft_resets", "offloads", "restores", "admitted", "copies"):
        assert steps[field].sum() == run.count(field), field
    assert steps["soft_resets"].sum() == stats.soft_resets
    assert steps["offloaded_blocks"].sum() == stats.offloaded_blocks
    assert steps["restored_blocks"].sum() == stats.restored_blocks
    assert steps["prefill_tokens"].sum() == stats.prefill_tokens
    assert steps["blocks"].max() == stats.peak_blocks
    assert Counter(timeline.buckets[bucket] for bucket in steps["bucket"]) == {
        str(bucket): count for bucket, count in stats.steps.items()
    }
    assert steps["new_tokens"].sum() == sum(len(request.generated_tokens) for request, _ in run.requests)
    assert timeline.num_ended == Counter(request.finish_reason for request, _ in run.requests)


def test_phases_follow_one_another(run_and_timeline):
    _, timeline = run_and_timeline
    steps = timeline.steps
    done = ~np.isnan(steps["update_end"])
    assert done.any()
    edges = [steps[done][f"{phase}_{edge}"] for phase in PHASES for edge in ("begin", "end")]
    assert (np.diff(edges, axis=0) >= 0).all()
    assert (steps["schedule_begin"][1:] >= steps["account_end"][:-1]).all()
    assert not np.isnan(steps["account_end"]).any(), "a step is recorded that was not dispatched"


def test_stays_are_the_admissions_and_their_ends(run_and_timeline):
    run, timeline = run_and_timeline
    stays = timeline.stays
    assert len(stays) == run.count("admitted")
    ends = Counter(stay.outcome for stay in stays)
    assert None not in ends
    assert (ends["soft reset"], ends["offload"]) == (run.count("soft_resets"), run.count("offloads"))
    by_slot = defaultdict(list)
    for stay in sorted(stays, key=lambda stay: stay.begin):
        by_slot[stay.slot].append(stay)
    for in_slot in by_slot.values():
        assert all(before.end <= after.begin for before, after in pairwise(in_slot))
    last = {stay.request_id: stay for stay in sorted(stays, key=lambda stay: stay.incarnation)}
    for request, _ in run.requests:
        if request.finish_reason in ("stop", "length"):
            stay = last[request.request_id]
            assert (stay.outcome, stay.num_tokens) == (request.finish_reason, len(request.generated_tokens))
            assert stay.incarnation == request.num_soft_resets + request.num_offloads


def test_the_random_runs_have_what_the_tests_are_about():
    runs = [recorded(seed) for seed in SEEDS]
    for field in ("soft_resets", "offloads", "restores", "copies", "admitted"):
        assert any(run.count(field) for run, _ in runs), field
    assert any(run.num_ended("cancelled") for run, _ in runs)
    assert any(timeline.loose_phases for _, timeline in runs)
    assert any(np.isnan(timeline.steps["update_end"]).any() for _, timeline in runs), "no step was aborted"


# The trace.


def test_the_trace_is_valid_and_says_the_same(run_and_timeline, tmp_path):
    run, timeline = run_and_timeline
    tracks, about = trace_of(timeline, tmp_path)
    host = tracks["host: the engine's loop", "phases"]
    in_steps = [event for event in host if event["args"]]
    names = Counter(event["name"] for event in in_steps)
    assert names["schedule"] == names["dispatch"] == len(run.steps) == about["steps"]
    assert names["update"] == np.count_nonzero(~np.isnan(timeline.steps["update_end"]))
    assert len(host) - len(in_steps) == len(timeline.loose_phases)
    device = tracks["device", "steps"]
    assert [event["name"] for event in device] == [str(record.bucket) for record in run.steps]
    for field in ("new_tokens", "soft_resets", "offloads", "ended"):
        assert sum(event["args"].get(field, 0) for event in device) == timeline.steps[field].sum()
    lanes = [event for (process, _), track in tracks.items() if process == "requests" for event in track]
    stays = [event for event in lanes if event["args"]]
    assert Counter(e["name"] for e in stays) == Counter(stay.request_id for stay in timeline.stays)
    assert [e["args"]["held"] for e in tracks["counters", "blocks"]] == timeline.steps["blocks"].tolist()
    assert {name for kind, name in tracks if kind == "counters"} == {"rows", "tokens", "blocks", "requests"}


def test_the_checks_of_traces_see_spans_that_overlap():
    spans = [{"ts": 0.0, "dur": 2.0}, {"ts": 1.0, "dur": 2.0}]
    text = json.dumps({
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "device"}},
            {"ph": "M", "name": "thread_name", "pid": 2, "tid": 1, "args": {"name": "steps"}},
            *({"ph": "X", "name": "x", "pid": 2, "tid": 1, "args": {}} | span for span in spans),
        ]
    })  # fmt: skip
    with pytest.raises(AssertionError, match="ends after the span"):
        checked_trace(text)


def test_compilations_get_lanes_of_their_own(tmp_path):
    engine, device, timeline = timed_engine(step_seconds=1.0, host_seconds=1.0)
    for name, end, seconds in (("one", 110.0, 5.0), ("two", 111.0, 5.0), ("three", 120.0, 9.0)):
        device.clock.now = end
        engine.tracer.compiled(name, seconds)
    finish(engine)
    tracks, _ = trace_of(timeline, tmp_path)
    lanes = {lane: [event["name"] for event in track] for (kind, lane), track in tracks.items() if kind == "compiler"}
    assert lanes == {"lane 0": ["one", "three"], "lane 1": ["two"]}
    assert timeline.steps["compiled"].tolist() == [3] + [0] * (timeline.num_steps - 1)
    assert tracks["device", "steps"][0]["args"]["compiled"] == 3


def test_a_timeline_without_steps_is_a_trace_and_a_table(tmp_path):
    timeline = Timeline()
    tracks, about = trace_of(timeline, tmp_path)
    assert tracks == {}
    assert about["device_active_fraction_of_wall_clock"] is None
    assert str(timeline).startswith("steps")


# Bounds, and who listens when.


def test_a_full_ring_drops_the_oldest_steps_and_says_so(tmp_path):
    _, all_of_it = recorded(3)
    _, timeline = recorded(3, max_steps=10)
    assert timeline.num_steps == all_of_it.num_steps > 10
    assert timeline.num_dropped == timeline.num_steps - 10
    kept, expected = timeline.steps, all_of_it.steps[-10:]
    for field in ("index", "rows", "new_tokens", "blocks", "admitted"):
        assert kept[field].tolist() == expected[field].tolist(), field
    assert f"the first {timeline.num_dropped} of them dropped" in str(timeline)
    _, about = trace_of(timeline, tmp_path)
    assert (about["steps"], about["steps_dropped"]) == (timeline.num_steps, timeline.num_dropped)


def test_a_step_takes_204_bytes():
    assert STEP.itemsize == 204


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_max_steps_is_an_int_of_at_least_one(wrong, error):
    with pytest.raises(error, match="max_steps"):
        Timeline(max_steps=wrong)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_who_begins_to_listen_in_the_middle_gets_the_steps_from_then_on(depth):
    engine = make_engine(depth=depth)
    early, late = Timeline(), Timeline()
    engine.tracer.add(early.recorder)
    for name in "abc":
        submit(engine, name, 5, 20)
    for _ in range(6):
        engine.step()
    before = early.num_steps
    engine.tracer.add(late.recorder)
    finish(engine)
    assert late.num_steps == early.num_steps - before
    for field in ("rows", "new_tokens", "ended", "blocks"):
        assert late.steps[field].tolist() == early.steps[field][before:].tolist(), field
    assert late.num_ended == early.num_ended
    assert late.stays == []
    engine.tracer.remove(early.recorder)
    submit(engine, "d", 5)
    finish(engine)
    assert early.num_steps == before + len(late.steps) - 6


@pytest.mark.parametrize("depth", [0, 2])
def test_a_timeline_can_be_saved_while_steps_are_in_flight_and_after_an_interrupt(depth, tmp_path):
    engine, device, timeline = timed_engine(step_seconds=2.0, host_seconds=1.0, depth=depth)
    for _ in range(4):
        engine.step()
    whole_forward = device.forward
    tracks, _ = trace_of(timeline, tmp_path)
    assert len(tracks["device", "steps"]) == 4 - depth
    assert len([stay for stay in timeline.stays if stay.outcome is None]) == 3

    def interrupted(batch, bucket):
        raise KeyboardInterrupt

    device.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort(3, "cancelled", "interrupted")
    tracks, about = trace_of(timeline, tmp_path)
    assert about["steps"] == 4
    loose = [event["name"] for event in tracks["host: the engine's loop", "phases"] if not event["args"]]
    assert loose == ["schedule, no step", "build, no step", "dispatch, no step"]
    assert timeline.num_ended == {"cancelled": 3}
    device.forward = whole_forward
    submit(engine, "again", 5)
    finish(engine)
    assert timeline.steps["index"].tolist() == list(range(timeline.num_steps))
    trace_of(timeline, tmp_path)


# Files.


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    _, timeline = recorded(0)
    path = tmp_path / "trace.json"
    path.write_text("the old one")

    def fails(steps):
        raise OSError("no space left")

    monkeypatch.setattr("cbjax.timeline.chrome.device_activity", fails)
    with pytest.raises(OSError, match="no space left"):
        timeline.save(path)
    assert path.read_text() == "the old one"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    with pytest.raises(FileNotFoundError, match=r"its folder does not exist.*no_folder/trace\.json'$"):
        timeline.save(tmp_path / "no_folder" / "trace.json")


def test_a_place_that_cannot_be_written_is_known_before(tmp_path, monkeypatch):
    check_writable(tmp_path / "new.json")
    check_writable("/dev/null")
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "none" / "x", "does not exist")):
        with pytest.raises(ValueError, match=why):
            check_writable(path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable(tmp_path / "new.json")


def test_devices_are_written_to_and_not_replaced():
    Timeline().save("/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
