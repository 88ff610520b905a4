"""`add`, `cancel`, `schedule` and `update` are pure: old states stay what they were, inputs replay to equal plans."""

from collections import deque
from dataclasses import fields

import numpy as np
import pytest
from machines import DEPTHS, make_config, make_request, random_script

from cbjax.scheduler import (
    EVICTION_MAPPING,
    BlockPool,
    SchedulerConfig,
    SchedulerState,
    StepPlan,
    add,
    cancel,
    initial_state,
    schedule,
    update,
)


def values(array: np.ndarray) -> tuple:
    return array.dtype.str, array.shape, array.tobytes()


def pool_values(pool: BlockPool) -> tuple:
    """What is free, in which order cached blocks go, and what is remembered of those that went."""
    order, ghosts = pool.cached, pool.ghosts
    arrays = [values(array) for array in (pool.free_ids(), order.before, order.after, order.marks, ghosts.table)]
    return arrays, order.late, order.size, order.num_protected, ghosts.counts, ghosts.room


def state_values(state: SchedulerState) -> tuple:
    """Everything that can be read from a state, copied out of it."""
    records = []
    for record in state.records:
        if record is not None:
            chain, blocks = record.chain, []
            while chain is not None:
                blocks.append(values(chain.tokens))
                chain = chain.before
            records.append((record.request.uid, values(record.history), tuple(blocks), values(record.table)))
        else:
            records.append(None)
    waiting = [(w.request.uid, values(w.outputs), w.incarnation, w.evicted) for w in state.waiting]
    arrays = [values(getattr(state, name)) for name in ("rows", "tail", "words", "eos")]
    pool = pool_values(state.pool)
    return (pool, waiting, arrays, records, state.num_admissions, state.num_in_flight)


def plan_values(plan: StepPlan) -> tuple:
    """Everything that can be read from a plan, copied out of it."""
    arrays = [values(getattr(part, f.name)) for part in (plan.batch, plan.table) for f in fields(part)]
    return arrays, plan.soft_resets, plan.num_starved, plan.drain


def replay(config: SchedulerConfig, inputs: list) -> list[StepPlan]:
    """The dispatched plans of a recorded run. Applies each input twice, and looks at all old states at the end."""
    state, plans, in_flight = initial_state(config), [], deque()
    before = [(state, state_values(state))]
    for kind, value in inputs:
        if kind == "add":
            state, again = add(state, value), add(state, value)
        elif kind == "cancel":
            (state, found), (again, found_again) = cancel(state, value), cancel(state, value)
            assert found == found_again
        elif kind == "schedule":
            (plan, state), (plan_again, again) = schedule(state), schedule(state)
            assert plan_values(plan) == plan_values(plan_again)
            if not plan.is_empty:
                plans.append(plan)
                in_flight.append((plan, plan_values(plan)))
        else:
            plan, was = in_flight.popleft()
            (state, results), (again, results_again) = update(state, plan, value), update(state, plan, value)
            assert (results.uid.tolist(), results.ended) == (results_again.uid.tolist(), results_again.ended)
            assert plan_values(plan) == was
        assert state_values(state) == state_values(again)
        before.append((state, state_values(state)))
    assert all(state_values(old) == was for old, was in before)
    return plans


@pytest.mark.parametrize("depth", DEPTHS)
def test_recorded_inputs_replay_to_the_same_plans_and_leave_old_states_alone(depth: int) -> None:
    num_resets = 0
    for seed in range(12):
        loop = random_script(seed, depth)
        plans = replay(loop.config, loop.inputs)
        assert [plan_values(plan) for plan in plans] == [plan_values(plan) for plan in loop.plans]
        num_resets += loop.num_resets
    assert num_resets > 5


@pytest.mark.parametrize("eviction", EVICTION_MAPPING)
def test_with_shared_prefixes_inputs_replay_to_the_same_plans_under_every_policy(eviction: str) -> None:
    found = 0
    for seed in range(6):
        loop = random_script(seed, seed % 4, shares_blocks=True, eviction=EVICTION_MAPPING[eviction])
        plans = replay(loop.config, loop.inputs)
        assert [plan_values(plan) for plan in plans] == [plan_values(plan) for plan in loop.plans]
        found += sum(map(sum, loop.cached.values()))
    assert found > 0


def test_two_futures_of_one_state_do_not_touch_each_other() -> None:
    state = initial_state(make_config(num_blocks=6))
    for uid in range(3):
        state = add(state, make_request(uid, 6, 8))
    _, state = schedule(state)
    was = state_values(state)
    without_first, _ = cancel(state, 0)
    without_last, _ = cancel(state, 2)
    branches = [add(without_first, make_request(3, 2, 2)), add(without_last, make_request(3, 5, 2))]
    plans = [schedule(branch)[0] for branch in branches]
    assert [plan.batch.uid.tolist() for plan in plans] == [[1, 2, 3], [0, 1, 3]]
    assert state_values(state) == was


def test_a_state_cannot_be_written_by_accident() -> None:
    state = add(initial_state(make_config()), make_request(0, 5, 2))
    _, state = schedule(state)
    record = state.records[0]
    assert record is not None
    for array in (
        *(state.rows, state.tail, state.words, state.eos, record.table, record.history),
        *(state.pool.blank, state.pool.cached.before, state.pool.cached.after, state.pool.cached.marks),
        state.pool.ghosts.table,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_plan_shares_no_memory_with_the_states_beside_it() -> None:
    before = add(initial_state(make_config()), make_request(0, 5, 2))
    plan, after = schedule(before)
    for state in (before, after):
        owned = [state.rows, state.tail, state.words, state.eos, state.pool.blank]
        owned += [array for record in state.records if record for array in (record.history, record.table)]
        for part in (plan.batch, plan.table):
            for f in fields(part):
                assert not any(np.shares_memory(getattr(part, f.name), array) for array in owned), f.name


def test_a_pool_gives_and_takes_without_changing_the_old_one() -> None:
    full = BlockPool.full(4)
    taken = full.take(3)
    assert taken is not None
    pool, ids = taken
    assert ids.tolist() == [0, 1, 2]
    back = pool.give_back(ids[:2])
    again = back.take(3)
    assert again is not None
    assert sorted(again[1].tolist()) == [0, 1, 3]
    assert (full.num_free, pool.num_free, back.num_free) == (4, 1, 3)
    everything = full.take(4)
    assert everything is not None
    assert everything[1].tolist() == [0, 1, 2, 3]
