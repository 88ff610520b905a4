"""Two recordings side by side, and one without its tokens."""

from dataclasses import replace

import pytest
from machines import make_config, make_request
from recordings import changed, first_other_plan, of, recorded, without

from cbjax.recording import Add, Cancel, LiveScheduler, Start, Update, anonymise, compare, read_recording, replay
from cbjax.recording.compare import differences


@pytest.fixture(scope="module")
def runs():
    """Some of the random runs."""
    return [recorded(seed) for seed in range(20)]


# Two recordings.


def test_a_recording_does_not_differ_from_itself(runs):
    for _, recording in runs[:8]:
        found = compare(recording, recording)
        assert not found
        assert str(found) == "no difference: the same inputs and the same plans"


def test_the_first_difference_is_said_of_configs_inputs_and_plans(runs):
    for _, recording in runs:
        cancels = [i for i, given in enumerate(recording.inputs) if isinstance(given, Cancel)]
        for i in cancels[:1]:
            edited = without(recording, i)
            step, found = first_other_plan(recording, edited), compare(recording, edited)
            assert found
            assert f"cancel of {recording.inputs[i].uid} | " in found.inputs[0]
            assert bool(found.plan) == (step is not None)
            # Where one run waited and the other did not, the plans themselves may still be the same.
            assert step is None or found.plan_step >= step
            assert found.inputs_step <= found.plan_step or not found.plan
    _, recording = runs[0]
    start = recording.inputs[0]
    larger = replace(start.config, num_blocks=start.config.num_blocks + 1, safety_margin=0.33)
    found = compare(recording, changed(recording, 0, Start(config=larger)))
    blocks = start.config.num_blocks
    assert f"start.config.num_blocks: {blocks} | {blocks + 1}" in found.inputs
    assert f"start.config.safety_margin: {start.config.safety_margin} | 0.33" in found.inputs


def test_one_that_goes_on_is_named(runs):
    _, recording = runs[1]
    half = of(recording.inputs[: len(recording.inputs) // 2], "half")
    steps = len(list(replay(half)))
    found = compare(recording, half)
    assert found.plan == (f"only {recording.name} goes on",)
    assert found.plan_step == steps
    assert compare(half, recording).plan == found.plan


# Without tokens.


def test_an_anonymised_recording_makes_the_same_plans_and_holds_no_id_of_the_original(runs, tmp_path):
    for run, recording in runs[:15]:
        path = tmp_path / "out.cbjax"
        anonymise(recording, path)
        other = read_recording(path)
        steps = list(replay(other))
        assert len(steps) == len(run.steps)
        for step, original in zip(steps, run.steps, strict=True):
            found = list(differences(original.plan, step.plan, "plan"))
            assert all(line.startswith("plan.batch.tokens[") for line in found)
        ended_by = {token for _, eos in run.requests for token in eos}
        for given in other.inputs:
            if isinstance(given, Add):
                assert (given.request.prompt >= 2**30).all()
            if isinstance(given, Update):
                assert all(token >= 2**30 or token in {0, *ended_by} for token in given.tokens.tolist())


def test_anonymised_prompts_begin_alike_exactly_as_far_as_they_did(tmp_path):
    told = []
    scheduler = LiveScheduler(make_config())
    scheduler.record(told.append)
    prompts = [[1, 2, 3, 4], [1, 2, 9, 4], [2, 2, 3, 4], [1, 2, 3, 4, 5]]
    for uid, prompt in enumerate(prompts):
        scheduler.add(make_request(uid, prompt, 2))
    scheduler.add(replace(make_request(4, prompts[0], 2), namespace=b"secret"))
    anonymise(of(told), tmp_path / "a.cbjax")
    recording = read_recording(tmp_path / "a.cbjax")
    one, two, three, four, salted = (given.request.prompt.tolist() for given in recording.inputs[1:])
    assert one[:2] == two[:2]
    assert one == four[:4]
    assert len({*one, *two[2:], *three, *four[4:], *salted}) == 4 + 2 + 4 + 1 + 4
    assert recording.inputs[-1].request.namespace not in (b"", b"secret")
    anonymise(of(told), tmp_path / "b.cbjax")
    assert read_recording(tmp_path / "b.cbjax").inputs[1].request.prompt.tolist() != one


def test_a_recording_that_was_not_closed_is_none_after_it_is_anonymised(runs, tmp_path):
    _, recording = runs[0]
    anonymise(replace(recording, is_complete=False), tmp_path / "a.cbjax")
    assert not read_recording(tmp_path / "a.cbjax").is_complete
