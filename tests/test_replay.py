"""A recording makes the same plans again, with no engine and in any process; one that was changed does not."""

import hashlib
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from machines import VOCAB_SIZE, make_batch, make_config, make_request
from recorded_runs import random_run
from recordings import NUM_RUNS, answers, changed, first_other_plan, of, recorded, without, write

from cbjax.recording import (
    Add,
    Cancel,
    LiveScheduler,
    RecordingWriter,
    ReplayMismatch,
    Update,
    compare,
    live,
    plan_digest,
    player,
    replay,
)
from cbjax.recording.compare import differences
from cbjax.scheduler import BlockCopies, StepPlan, TableDelta

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def runs():
    """Seed by seed what the engine did, and what was recorded."""
    return [recorded(seed) for seed in range(NUM_RUNS)]


# The same plans.


def test_100_random_runs_give_identical_plans(runs):
    for run, recording in runs:
        steps = list(replay(recording))
        assert len(steps) == len(run.steps)
        for i, (step, original) in enumerate(zip(steps, run.steps, strict=True)):
            assert step.index == i
            assert list(differences(original.plan, step.plan, "plan")) == []
            assert step.state.pool.num_free == original.state.pool.num_free


def test_these_runs_do_what_they_are_for(runs):
    counts = {name: sum(run.count(name) for run, _ in runs) for name in ("soft_resets", "offloads", "restores")}
    assert min(counts.values()) > 15, counts
    assert sum(run.count("copies") for run, _ in runs) > 40
    kinds = Counter(type(given).__name__ for _, recording in runs for given in recording.inputs)
    assert kinds["Cancel"] > 40
    assert min(kinds["Renew"], kinds["Reset"]) > 5
    cached = [admission.num_cached for run, _ in runs for step in run.steps for admission in step.plan.admitted]
    assert sum(map(bool, cached)) > 100
    assert len({recording.inputs[0].config.policy.name for _, recording in runs}) == 2
    assert sum(run.num_ended("stop") for run, _ in runs) > 40


def test_the_results_of_a_replay_are_the_tokens_that_requests_got(runs):
    for run, recording in runs[:30]:
        tokens, reasons, unanswered = defaultdict(list), {}, 0
        for step in replay(recording):
            if step.results is None:
                unanswered += 1
                continue
            results = step.results
            for uid, token in zip(results.uid.repeat(results.count).tolist(), results.tokens.tolist(), strict=True):
                tokens[uid].append(token)
            reasons |= {ended.uid: ended.reason for ended in step.results.ended}
        for request, _ in run.requests:
            assert tokens[request.uid] == request.generated_tokens
            assert reasons.get(request.uid, "cancelled") == request.finish_reason
        assert unanswered <= 3 * sum(type(given).__name__ == "Reset" for given in recording.inputs)


@pytest.mark.parametrize("hash_seed", ["1", "2024"])
def test_another_process_makes_the_same_plans_whatever_its_hash_seed_and_without_jax(runs, hash_seed, tmp_path):
    code = (
        "import sys, cbjax\n"
        "print(*(sum(1 for step in cbjax.replay(path)) for path in sys.argv[1:]))\n"
        "print(*sorted({'jax', 'flax', 'tqdm'} & set(sys.modules)))\n"
    )
    chosen = runs[:20]
    paths = [write(tmp_path / f"{i}.cbjax", recording.inputs) for i, (_, recording) in enumerate(chosen)]
    command = [sys.executable, "-c", code, *map(str, paths)]
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n")[:2] == [" ".join(str(len(run.steps)) for run, _ in chosen), ""]


def test_several_engines_go_into_one_recording(tmp_path):
    writer = RecordingWriter(tmp_path / "run.cbjax")
    steps = [step for seed in (0, 1) for step in random_run(seed, writer).steps]
    writer.close()
    replayed = list(replay(tmp_path / "run.cbjax"))
    assert [step.index for step in replayed] == list(range(len(steps)))
    for step, original in zip(replayed, steps, strict=True):
        assert list(differences(original.plan, step.plan, "plan")) == []


# Other plans.


def test_a_cancel_that_was_taken_out_is_noticed_at_the_first_step_that_it_changes(runs):
    noticed = 0
    for _, recording in runs[:50]:
        cancels = [i for i, given in enumerate(recording.inputs) if isinstance(given, Cancel)]
        for i in cancels[:1]:
            edited = without(recording, i)
            step = first_other_plan(recording, edited)
            if step is None:
                continue  # it was cancelled before it had any effect, and then everything was
            steps = []
            with pytest.raises(ReplayMismatch, match=rf"^step {step}: the plan is not the recorded one") as error:
                steps.extend(replay(edited))
            assert error.value.step == len(steps) == step
            assert error.value.__notes__[0].startswith("edited: record ")
            noticed += 1
    assert noticed > 10


def test_a_request_with_another_prompt_is_noticed_at_its_first_chunk(runs):
    for run, recording in runs[:20]:
        uid = run.steps[0].plan.batch.uid[0]
        i = next(i for i, given in enumerate(recording.inputs) if isinstance(given, Add) and given.request.uid == uid)
        request = recording.inputs[i].request
        prompt = np.append((request.prompt[:1] + 1) % VOCAB_SIZE, request.prompt[1:]).astype(np.int32)
        edited = changed(recording, i, Add(request=replace(request, prompt=prompt)))
        with pytest.raises(ReplayMismatch, match="the plan is not the recorded one") as error:
            list(replay(edited))
        assert error.value.plan is not None
        assert request.uid in error.value.plan.batch.uid


def test_an_answer_that_ends_a_request_is_noticed_and_one_that_has_no_effect_is_shown_by_the_comparison(tmp_path):
    told = []
    scheduler = LiveScheduler(make_config())
    scheduler.record(told.append)
    scheduler.add(make_request(0, 3, 6, eos=(5,)))
    for token in (10, 11, 12, 13):
        plan = scheduler.schedule()
        scheduler.update(plan, answers([token]))
    original = of(told, "original")
    where = [i for i, given in enumerate(told) if isinstance(given, Update)][1]
    eos, other = (changed(original, where, Update(tokens=np.array([token], np.int32))) for token in (5, 6))

    with pytest.raises(ReplayMismatch, match=r"^step 2: the plan is not the recorded one, since nothing can run"):
        list(replay(eos))
    assert len(list(replay(other))) == 4
    found = compare(original, other)
    assert (found.inputs_step, found.inputs) == (2, ("update.tokens[0]: 11 | 6",))
    assert found.plan == ()
    assert "every plan is the same" in str(found)


def test_answers_of_another_number_of_rows_are_noticed(runs):
    _, recording = runs[0]
    i = next(i for i, given in enumerate(recording.inputs) if isinstance(given, Update))
    many = changed(recording, i, Update(tokens=np.zeros(99, np.int32)))
    with pytest.raises(ReplayMismatch, match="99 rows were answered and a plan of"):
        list(replay(many))
    twice = of([*recording.inputs, recording.inputs[i]])
    with pytest.raises(ReplayMismatch, match="and no plan is in flight"):
        list(replay(twice))


def test_an_error_of_the_scheduler_is_recorded_and_comes_again(monkeypatch):
    def broken(state, max_window):
        raise AssertionError("an invariant")

    told = []
    scheduler = LiveScheduler(make_config())
    scheduler.record(told.append)
    scheduler.add(make_request(0, 3, 6))
    scheduler.update(scheduler.schedule(), answers([4]))
    for module in (live, player):
        monkeypatch.setattr(module, "schedule", broken)
    with pytest.raises(AssertionError, match="an invariant"):
        scheduler.schedule()
    scheduler.reset()
    assert told[-2].digest is None
    with pytest.raises(AssertionError, match="an invariant") as error:
        list(replay(of(told[:2] + told[-2:])))
    assert error.value.__notes__ == ["edited: record 3"]


# Digests.


def make_plan(**changes):
    batch = make_batch([1, 3])
    return StepPlan(**{"batch": batch, "table": TableDelta.empty(), **changes})


def test_a_digest_tells_every_field_of_a_plan_and_of_its_parts(runs):
    plan = next(
        step.plan for run, _ in runs for step in run.steps if step.plan.offloads and step.plan.batch.num_rows > 1
    )
    digests = {plan_digest(plan)}
    for part, owner in ((plan, None), (plan.batch, "batch"), (plan.offloads[0], "offloads")):
        for f in fields(part):
            other = replace(part, **{f.name: another(getattr(part, f.name))})
            whole = {None: other, "batch": replace(plan, batch=other), "offloads": replace(plan, offloads=(other,))}
            digests.add(plan_digest(whole[owner]))
    # The batch is changed as a whole and by its first field, which is the same change.
    assert len(digests) == len(fields(plan)) + len(fields(plan.batch)) + len(fields(plan.offloads[0]))


def another(value):
    """A value of the same kind that is not this one."""
    if isinstance(value, np.ndarray):
        return np.append(value.ravel(), value.dtype.type(1))
    if isinstance(value, bool | int):
        return not value if isinstance(value, bool) else value + 1
    if isinstance(value, tuple):
        return (*value, 1)
    return replace(value, **{fields(value)[0].name: another(getattr(value, fields(value)[0].name))})


def test_equal_plans_have_one_digest_and_it_is_what_it_always_was():
    plan = make_plan(num_starved=3)
    copies = BlockCopies(sources=np.empty(0, np.int64).astype(np.int32), destinations=np.empty(0, np.int32))
    again = make_plan(num_starved=np.int64(3), copies=copies)
    assert plan_digest(plan) == plan_digest(again)
    swapped = replace(plan, batch=replace(plan.batch, start=plan.batch.start.astype(">i4")))
    assert plan_digest(swapped) == plan_digest(plan)
    # By hand, so that a digest of today is one of tomorrow and of another machine.
    assert plan_digest(Pair(first=np.array([1, 2], np.int32), rest=(None, True, 7, "x"))) == expected_digest()


@dataclass(frozen=True)
class Pair:
    first: np.ndarray
    rest: tuple


def expected_digest():
    content = b"Pair:first=<i4(2,)\x01\0\0\0\x02\0\0\0rest=[4]None;True;7;'x';"
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def test_a_field_that_is_yet_to_come_is_in_the_digest():
    plan = make_plan()
    Future = make_dataclass("StepPlan", [("priority", int)], bases=(StepPlan,), frozen=True, kw_only=True, eq=False)
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    assert plan_digest(Future(**values, priority=1)) != plan_digest(Future(**values, priority=2))
    with pytest.raises(TypeError, match=r"a plan holds arrays, .* got a dict"):
        plan_digest(Future(**values, priority={}))
