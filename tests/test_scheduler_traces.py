"""The scheduler alone against the steps that transformers' continuous batching was seen to schedule."""

import json
from pathlib import Path

import pytest
from machines import constant_answers, make_config, make_request

from cbjax.scheduler import StepPlan, add, check, initial_state, schedule, update

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "scheduler_traces.json").read_text())
TRACES = GOLDENS["traces"]
ALL_STARVE = [trace for trace in GOLDENS["pressure"] if trace["name"] == "all_starve_at_once"]


def trace_id(trace: dict) -> str:
    return f"{trace['name']}-{trace['scheduler']}"


def replay(trace: dict) -> list[StepPlan]:
    """Every plan of a run with the recorded settings; request `ri` has uid i and arrives at its recorded step."""
    config = make_config(
        policy=trace["scheduler"],
        num_blocks=trace["num_blocks"],
        block_size=trace["block_size"],
        max_batch_tokens=trace["max_batch_tokens"],
        max_requests_per_batch=trace["max_requests_per_batch"] or 1024,
        safety_margin=trace["safety_margin"],
    )
    state, plans = initial_state(config), []
    to_come = list(enumerate(zip(trace["prompt_lengths"], trace["arrivals"], strict=True)))
    while to_come or not state.is_idle:
        while to_come and to_come[0][1][1] <= len(plans):
            uid, (length, _) = to_come.pop(0)
            state = add(state, make_request(uid, length, trace["max_new_tokens"]))
        plan, state = schedule(state)
        plans.append(plan)
        state, _ = update(state, plan, constant_answers(plan))
        check(state)
    return plans


def recorded(plan: StepPlan) -> dict:
    """The plan as the recording writes a step."""
    batch = plan.batch
    rows = [[f"r{uid}", count] for uid, count in zip(batch.uid.tolist(), batch.count.tolist(), strict=True)]
    return {"rows": rows, "query_tokens": batch.num_tokens, "kv_reads": batch.kv_reads}


def test_the_recording_is_complete() -> None:
    names = {"chunked", "two_requests_a_batch", "mixed_lengths", "late_arrivals"}
    assert {trace_id(trace) for trace in TRACES} == {f"{n}-{s}" for n in names for s in ("fifo", "prefill_first")}
    assert len(ALL_STARVE) == 2


@pytest.mark.parametrize("trace", TRACES, ids=trace_id)
def test_reproduces_the_recorded_steps(trace: dict) -> None:
    assert [recorded(plan) for plan in replay(trace)] == trace["steps"]


@pytest.mark.parametrize("trace", ALL_STARVE, ids=trace_id)
def test_resets_whom_transformers_resets_when_all_starve_at_once(trace: dict) -> None:
    # transformers spends a step without a batch on the decision; ours decides and runs in one.
    steps = [{name: step[name] for name in ("rows", "query_tokens", "kv_reads")} for step in trace["steps"]]
    (full,) = [i for i, step in enumerate(trace["steps"]) if step["full"]]
    plans = replay(trace)
    assert [recorded(plan) for plan in plans] == steps[:full] + steps[full + 1 :]
    resets = {i: {f"r{reset.uid}" for reset in plan.soft_resets} for i, plan in enumerate(plans) if plan.soft_resets}
    assert resets == {full: set(trace["steps"][full]["soft_reset"])}
