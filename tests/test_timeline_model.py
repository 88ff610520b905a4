"""`lm.timeline()` on a model that is compiled: calls, streams, managers, programs, and jax's profiler."""

import gzip
import json

import jax
import numpy as np
import pytest
from timed_devices import checked_trace

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus, Timeline
from cbjax.step_record import PHASES
from cbjax.testing import tiny_llama

PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 7, 64, 12, 80, 3], [1, 2], list(range(40, 61))]
GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)
BATCHING = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=64,
    max_blocks_per_request=64,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    allow_block_sharing=False,
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def generate(lm: CausalLM) -> None:
    outputs = lm.generate_batch(PROMPTS, GREEDY, BATCHING, request_ids=list("abcde"))
    assert {output.status for output in outputs.values()} == {RequestStatus.FINISHED}


def test_a_call_is_recorded_with_what_it_compiled(lm, tmp_path):
    lm.close()
    with lm.timeline() as timeline:
        generate(lm)
    stats = lm.session.engine.stats
    steps = timeline.steps
    assert len(steps) == timeline.num_steps == sum(stats.steps.values()) == 6
    assert steps["new_tokens"].sum() == 30
    assert steps["prefill_tokens"].sum() == stats.prefill_tokens == 36
    assert timeline.num_ended == {"length": 5}
    compiled = [each.name for each in timeline.compilations]
    assert sorted(compiled) == sorted(program.name for program in lm.session.device.programs.values())
    assert steps["compiled"].sum() == len(compiled)
    activity = timeline.device_activity
    assert 0.0 <= activity.sure <= activity.active <= activity.wall
    assert not np.isnan(steps["device_end"]).any()
    assert (steps["device_end"] <= steps["update_end"]).all()
    timeline.save(tmp_path / "trace.json")
    tracks = checked_trace((tmp_path / "trace.json").read_text())
    assert {event["name"] for event in tracks["device", "steps"]} == set(timeline.buckets)
    assert "6 in" in str(timeline)


def test_only_what_runs_in_the_block_is_recorded_and_streams_are_too(lm):
    with lm.timeline() as outer:
        generate(lm)
        with lm.timeline(max_steps=4) as inner:
            list(lm.stream([7, 8], GREEDY, BATCHING))
    generate(lm)
    assert (outer.num_steps, inner.num_steps, inner.num_dropped) == (12, 6, 2)
    assert outer.steps["rows"].tolist()[-4:] == inner.steps["rows"].tolist()
    assert lm.tracer.listeners == ()


def test_a_manager_is_recorded_and_looked_at_while_it_runs(lm):
    with lm.timeline() as timeline, lm.continuous_batching_context_manager(GREEDY, BATCHING) as manager:
        names = manager.add_requests(PROMPTS)
        for _ in names:
            assert manager.get_result(timeout=60).status is RequestStatus.FINISHED
            checked_trace("".join(lines(timeline)))
    assert timeline.num_ended == {"length": 5}
    assert timeline.steps["new_tokens"].sum() == 30
    assert {stay.request_id for stay in timeline.stays} == set(names)


def lines(timeline: Timeline):
    from cbjax.timeline.chrome import trace_lines

    return trace_lines(timeline)


def test_an_interrupted_stream_leaves_a_trace_of_what_ran(lm, tmp_path):
    with lm.timeline() as timeline:
        stream = lm.stream([7, 8, 9], GREEDY, BATCHING)
        next(stream)
        next(stream)
        stream.close()
    assert timeline.num_steps == 2
    assert timeline.num_ended == {"cancelled": 1}
    timeline.save(tmp_path / "trace.json")
    checked_trace((tmp_path / "trace.json").read_text())


def test_a_call_that_fails_stops_the_recording_and_not_the_model(lm):
    with pytest.raises(TypeError), lm.timeline():
        lm.generate_batch(3)
    assert lm.tracer.listeners == ()
    with pytest.raises(ValueError, match="max_steps"), lm.timeline(max_steps=0):
        pass
    generate(lm)


def test_a_profile_has_the_phases_by_the_same_names(lm, tmp_path):
    generate(lm)
    with jax.profiler.trace(tmp_path, create_perfetto_trace=True), lm.timeline() as timeline:
        generate(lm)
    (path,) = tmp_path.rglob("perfetto_trace.json.gz")
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert {phase: names.count(f"cbjax.{phase}") for phase in PHASES} == dict.fromkeys(PHASES, timeline.num_steps)
