"""Windows of several steps in one plan: the tokens of single steps, and nothing written that is not a row's own."""

from dataclasses import replace

import numpy as np
import pytest
from machines import (
    DEPTHS,
    POLICIES,
    Loop,
    Windows,
    constant_answers,
    make_config,
    make_prompt,
    make_request,
    random_script,
    solo,
)

from cbjax.scheduler import NUM_EOS_IDS, Field, StepPlan, add, check, initial_state, schedule, update

MAX_WINDOWS = (2, 5, 16)


def windows_of(loop: Loop) -> list[int]:
    return [plan.batch.window for plan in loop.plans]


# Random scripts.


def script(seed: int, depth: int, windows: Windows) -> Loop:
    changes = {"host_blocks": 6 * (seed % 3), "shares_blocks": bool(seed % 2), "forks": seed % 3 == 1}
    return random_script(seed, depth, windows, max_window=MAX_WINDOWS[seed // 2 % 3], **changes)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)], ids=str)
def test_random_scripts_in_windows_equal_solo_runs(windows: Windows, depth: int) -> None:
    loops = [script(seed, depth, windows) for seed in range(12)]
    in_windows = [plan.batch for loop in loops for plan in loop.plans if plan.batch.window > 1]
    assert len(in_windows) > 10
    assert any(batch.draws.max() > batch.draws.min() for batch in in_windows), "no row had less left than its window"
    assert any(ended.reason == "stop" for loop in loops for ended in loop.ended.values())
    assert any(loop.cancelled for loop in loops)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 2, 9)], ids=str)
def test_many_random_scripts_in_windows_equal_solo_runs(windows: Windows, depth: int) -> None:
    for seed in range(1000, 1360):
        script(seed, depth, windows)


# When there is a window, and how long it is.


def test_a_window_is_as_long_as_the_longest_row_has_left() -> None:
    loop = Loop(make_config(), max_window=16)
    loop.add(3, 8)
    loop.add(5, 4)
    loop.run()
    assert windows_of(loop) == [1, 7]
    assert loop.plans[1].batch.draws.tolist() == [7, 3]
    assert loop.plans[1].batch.num_tokens == 2
    assert loop.plans[1].batch.num_computed == 10


def test_long_rows_run_in_full_windows() -> None:
    loop = Loop(make_config(), max_window=5)
    loop.add(3, 14)
    loop.run()
    assert windows_of(loop) == [1, 5, 5, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_waits_or_prefills_is_not_kept_waiting_by_a_window(policy: str) -> None:
    loop = Loop(make_config(policy=policy, max_requests_per_batch=2, max_batch_tokens=8), max_window=16)
    loop.add(3, 30)
    loop.step()
    loop.add(20, 30)
    for _ in range(3):
        assert loop.step().batch.window == 1
    loop.add(3, 4)  # no slot is free
    for _ in range(5):
        assert loop.step().batch.window == 1
    loop.cancel(2)
    assert loop.step().batch.window == 16


def test_a_row_that_no_budget_is_left_for_is_not_kept_waiting_by_a_window() -> None:
    loop = Loop(make_config(max_batch_tokens=2), max_window=16)
    for _ in range(3):
        loop.add(1, 8)
    while not loop.state.is_idle:
        plan = loop.dispatch()
        assert plan.batch.window == 1 or plan.batch.num_rows == loop.state.num_active
        loop.collect()
    assert max(windows_of(loop)) > 1, "once two are left"
    loop.verify()


def test_a_window_is_halved_until_the_pool_has_its_blocks() -> None:
    # Two rows hold a block each of seven, and 5 are free: 8 steps need two more each, 16 would need four.
    loop = Loop(make_config(num_blocks=7), max_window=16)
    loop.add(3, 20)
    loop.add(3, 8)
    loop.step()
    plan = loop.step()
    assert plan.batch.window == 8
    assert plan.batch.draws.tolist() == [8, 7]
    loop.run()


def test_steps_in_flight_count_with_their_whole_windows() -> None:
    loop = Loop(make_config(), depth=3, max_window=4)
    loop.add(3, 12)
    for _ in range(4):
        loop.step()
    assert windows_of(loop) == [1, 4, 4, 3]
    assert loop.state.in_flight == (4, 4, 3)
    assert loop.state.rows[Field.DRAWN, 0] == 12
    loop.run()


# Ends within a window.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("place", range(1, 9))
def test_an_eos_id_ends_a_row_wherever_it_falls_in_a_window(place: int, depth: int) -> None:
    loop = Loop(make_config(), depth=depth, max_window=4)
    prompt = make_prompt(5, seed=1)
    tokens = solo(make_request(0, prompt, 20))
    assert len(set(tokens)) == 20
    loop.add(prompt, 20, (tokens[place - 1],))
    loop.add(7, 14)
    loop.run()
    assert len(loop.outputs[0]) == place
    assert loop.ended[0].token == tokens[place - 1]


def test_a_request_with_more_eos_ids_than_a_device_is_told_ends_where_it_should() -> None:
    loop = Loop(make_config(), max_window=8)
    prompt = make_prompt(5, seed=1)
    tokens = solo(make_request(0, prompt, 20))
    told = tuple(id for id in range(990, 997) if id not in tokens)[:NUM_EOS_IDS]
    loop.add(prompt, 20, (*told, tokens[3]))
    loop.run()
    assert loop.outputs[0] == tokens[:4]
    assert loop.plans[1].batch.eos[:, 0].tolist() == list(told)
    assert windows_of(loop) == [1, 8]


def test_a_row_that_has_ended_writes_nothing_more_even_in_the_window_that_follows() -> None:
    loop = Loop(make_config(), depth=1, max_window=8)
    prompt = make_prompt(4, seed=1)
    tokens = solo(make_request(0, prompt, 30))
    loop.add(prompt, 30, (tokens[2],))
    loop.add(prompt, 30)
    for _ in range(3):
        loop.step()
    assert windows_of(loop) == [1, 8, 8]
    first, second = (loop.device._cells_of(loop.device.table[0, slot, :5]).ravel() for slot in range(2))
    positions = loop.device.cells[1]
    assert positions[first].tolist() == [0, 1, 2, 3, 4, 5, *[-1] * 14], "two tokens were fed back of 16 planned"
    assert positions[second].tolist() == list(range(20))
    loop.run()


def test_a_row_that_fails_within_a_window_keeps_what_it_had_and_registers_no_further() -> None:
    state = add(initial_state(make_config(shares_blocks=True)), make_request(0, 3, 30))
    plan, state = schedule(state)
    state, _ = update(state, plan, constant_answers(plan, 5))
    plan, state = schedule(state, 12)
    assert plan.batch.window == 12
    answers = window_answers(plan, np.arange(12)[:, None] + 100)
    answers.finite[7:] = False  # 3 + 1 + 7 tokens are known, of which 3 + 7 are computed
    state, results = update(state, plan, answers)
    check(state)
    assert results.tokens.tolist() == list(range(100, 107))
    assert [(ended.uid, ended.reason) for ended in results.ended] == [(0, "failed")]
    assert state.pool.num_cached == 10 // 4
    assert state.pool.num_free == 64


def test_blocks_that_a_window_fills_are_found_by_the_next_prompt_up_to_the_end_that_was_accepted() -> None:
    loop = Loop(make_config(shares_blocks=True), max_window=16)
    prompt = make_prompt(5, seed=1)
    tokens = solo(make_request(0, prompt, 20))
    loop.add(prompt, 20, (tokens[9],))
    loop.run()
    assert windows_of(loop) == [1, 16]
    # 5 + 10 tokens, of which the last was not fed back.
    assert loop.state.pool.num_cached == (5 + 9) // 4
    again = loop.add([*prompt.tolist(), *tokens[:10], 1, 2], 3)
    loop.run()
    assert loop.cached[again] == [12]


@pytest.mark.parametrize("depth", DEPTHS)
def test_B38_a_cancel_between_a_window_and_its_answers(depth: int) -> None:
    loop = Loop(make_config(num_blocks=16), depth=depth, max_window=6)
    for _ in range(3):
        loop.add(4, 16)
    loop.step()
    plan = loop.dispatch()
    assert plan.batch.window > 1
    loop.cancel(1)
    loop.add(6, 9)  # takes its slot and blocks at once
    loop.run()
    assert len(loop.outputs[1]) <= 1


# Values.


def window_answers(plan: StepPlan, tokens: np.ndarray):
    one = constant_answers(plan)
    shape = (plan.batch.window, plan.batch.num_rows)
    return replace(
        one,
        tokens=np.broadcast_to(tokens, shape).astype(np.int32),
        logprobs=np.zeros(shape, np.float32),
        finite=np.ones(shape, bool),
    )


def test_results_come_request_by_request_in_the_order_of_the_plan_and_of_the_draws() -> None:
    state = initial_state(make_config())
    for uid, new in enumerate((9, 3)):
        state = add(state, make_request(uid, 3, new))
    plan, state = schedule(state)
    state, _ = update(state, plan, constant_answers(plan, 5))
    plan, state = schedule(state, 4)
    state, results = update(state, plan, window_answers(plan, np.arange(8).reshape(4, 2)))
    assert (results.uid.tolist(), results.count.tolist()) == ([0, 1], [4, 2])
    assert results.tokens.tolist() == [0, 2, 4, 6, 1, 3]
    assert [(ended.uid, ended.reason) for ended in results.ended] == [(1, "length")]
    check(state)


def test_kv_reads_of_a_window_are_those_of_its_steps() -> None:
    loop = Loop(make_config(), max_window=3)
    loop.add(4, 6)
    loop.run()
    assert windows_of(loop) == [1, 3, 2]
    assert [plan.batch.kv_reads for plan in loop.plans] == [0, 4 + 5 + 6, 7 + 8]
