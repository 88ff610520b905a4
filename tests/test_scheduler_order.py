"""Who gets the step's budgets: the order of the policies, the margin, the waiting line, the response to pressure."""

import numpy as np
import pytest
from machines import POLICIES, Loop, make_config, make_request

from cbjax.scheduler import SCHEDULER_MAPPING, add, blocks_for, cancel, initial_state, schedule, scheduler_named
from cbjax.scheduler.waiting import Waiting, WaitingLine


def started(*requests: tuple[int, int], **changes) -> Loop:
    """A loop to which requests of (prompt tokens, new tokens) were added, in this order."""
    loop = Loop(make_config(**changes))
    for prompt, max_new_tokens in requests:
        loop.add(prompt, max_new_tokens)
    return loop


def rows_of(loop: Loop, steps: int) -> list[list[tuple[int, int]]]:
    """(uid, tokens) of the rows of the next steps."""
    before = len(loop.plans)
    for _ in range(steps):
        loop.step()
    return loop.rows()[before:]


def test_policies_are_known_by_name() -> None:
    assert set(SCHEDULER_MAPPING) == set(POLICIES)
    assert scheduler_named("fifo").default_safety_margin == 0.15
    assert scheduler_named("prefill_first").default_safety_margin == 0.0
    with pytest.raises(ValueError, match=r"scheduler_type must be one of .*fifo.*prefill_first.*; got 'lifo'"):
        scheduler_named("lifo")


@pytest.mark.parametrize(
    ("policy", "second", "third"),
    [("fifo", [(0, 1), (1, 7)], [(0, 1), (1, 7)]), ("prefill_first", [(1, 8)], [(1, 8)])],
)
def test_a_policy_says_whether_decodes_or_half_done_prefills_go_first(policy: str, second: list, third: list) -> None:
    loop = started((4, 6), (30, 2), (2, 2), policy=policy, max_batch_tokens=8)
    assert rows_of(loop, 3) == [[(0, 4), (1, 4)], second, third]
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_requests_come_last(policy: str) -> None:
    loop = started((4, 6), (6, 4), policy=policy, max_batch_tokens=8)
    assert rows_of(loop, 1) == [[(0, 4), (1, 4)]]
    loop.add(9, 2)
    active = [(0, 1), (1, 2)] if policy == "fifo" else [(1, 2), (0, 1)]
    assert rows_of(loop, 1) == [[*active, (2, 5)]]
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_of_tokens_and_rows_hold_and_the_oldest_go_first(policy: str) -> None:
    loop = started(*[(1, 9)] * 6, policy=policy, max_batch_tokens=3, max_requests_per_batch=5)
    assert rows_of(loop, 3) == [[(0, 1), (1, 1), (2, 1)]] * 3
    loop.run()
    assert all(plan.batch.num_tokens <= 3 for plan in loop.plans)
    loop = started(*[(1, 3)] * 6, policy=policy, max_requests_per_batch=4)
    assert rows_of(loop, 1) == [[(0, 1), (1, 1), (2, 1), (3, 1)]]
    loop.run()
    assert all(plan.batch.num_rows <= 4 for plan in loop.plans)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_margin_holds_back_waiting_requests_and_never_active_ones(policy: str) -> None:
    # The first comes to hold 9 of 10 blocks: its second chunk and its decodes go below the reserve of 5. When the
    # second request is offered a place, 6 blocks minus the 2 that this step has taken are free.
    loop = started((24, 12), (2, 2), policy=policy, num_blocks=10, max_batch_tokens=16, safety_margin=0.5)
    assert rows_of(loop, 2) == [[(0, 16)], [(0, 8)]]
    assert rows_of(loop, 11) == [[(0, 1)]] * 11
    assert [len(plan.table) for plan in loop.plans] == [4, 2, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert rows_of(loop, 1) == [[(1, 2)]]
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_margin_ends_admission_at_the_request_that_reaches_it(policy: str) -> None:
    # Free before each: 10, 8, 6, 4; the reserve is 5, and what this step has taken counts.
    loop = started(*[(8, 1)] * 4, policy=policy, num_blocks=10, safety_margin=0.5)
    assert rows_of(loop, 2) == [[(0, 8), (1, 8), (2, 8)], [(3, 8)]]
    loop.run()


def test_an_empty_step_may_admit_one_request_below_the_margin() -> None:
    # The first has its only output in flight: it is active, has nothing to run, and holds the pool below the reserve.
    loop = Loop(make_config(num_blocks=10, safety_margin=1.0), depth=1)
    for _ in range(3):
        loop.add(4, 1)
    assert loop.dispatch().batch.uid.tolist() == [0]
    assert loop.state.num_active == 1
    assert loop.dispatch().batch.uid.tolist() == [1]
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_head_of_the_line_is_not_overtaken(policy: str) -> None:
    # The second needs 5 blocks of which 4 are free; the third would fit.
    loop = started((8, 4), (20, 2), (1, 1), policy=policy, num_blocks=6)
    assert rows_of(loop, 4) == [[(0, 8)], *[[(0, 1)]] * 3]
    assert rows_of(loop, 1) == [[(1, 20), (2, 1)]]
    loop.run()


def test_a_cancelled_head_makes_way_and_the_order_of_the_others_stays() -> None:
    loop = started(*[(2, 2)] * 6, max_requests_per_batch=1)
    assert [waiting.request.uid for waiting in loop.state.waiting] == [0, 1, 2, 3, 4, 5]
    for uid in (3, 0, 4):
        loop.cancel(uid)
    assert [waiting.request.uid for waiting in loop.state.waiting] == [1, 2, 5]
    loop.run()
    assert [rows[0][0] for rows in loop.rows()] == [1, 1, 2, 2, 5, 5]


def test_the_line_is_victims_the_latest_first_and_then_fresh_requests() -> None:
    def waiting(uid: int) -> Waiting:
        return Waiting(request=make_request(uid, 2, 2), outputs=np.empty(0, np.int32))

    line = WaitingLine.empty().push(waiting(5)).push(waiting(6))
    line = line.push_front([waiting(3), waiting(4)]).push_front([waiting(1), waiting(2)]).push(waiting(7))
    old, order = line, []
    line = line.remove(4)
    while (head := line.head()) is not None:
        assert next(iter(line)) is head
        order.append(head.request.uid)
        line = line.remove(head.request.uid)
    assert order == [1, 2, 3, 5, 6, 7]
    assert not len(line)
    assert [w.request.uid for w in old] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_rows", "victims"), [(3, [2]), (4, [3, 2]), (5, [4, 3])])
def test_victims_are_the_newest_starved_and_as_many_as_it_takes(policy: str, num_rows: int, victims: list[int]) -> None:
    # Every row fills two blocks and wants a third one at the same step; a victim gives two.
    loop = started(*[(8, 6)] * num_rows, policy=policy, num_blocks=2 * num_rows)
    loop.step()
    plan = loop.step()
    assert [reset.uid for reset in plan.soft_resets] == victims
    assert {(reset.num_blocks, reset.num_tokens) for reset in plan.soft_resets} == {(2, 8)}
    assert plan.batch.uid.tolist() == list(range(num_rows - len(victims)))
    assert plan.num_starved == 0
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_starved_rows_wait_while_others_run(policy: str) -> None:
    # At the second step only the first row has room in its last block.
    loop = started((6, 3), (8, 3), policy=policy, num_blocks=4)
    assert rows_of(loop, 4) == [[(0, 6), (1, 8)], [(0, 1)], [(0, 1)], [(1, 1)]]
    assert [plan.num_starved for plan in loop.plans] == [0, 1, 1, 0]
    assert not loop.num_resets
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_admitted_while_an_active_request_starves(policy: str) -> None:
    # The second request's next chunk wants 3 blocks and gets none; one is free, and the third request needs no more.
    loop = started((8, 6), (16, 2), (1, 1), policy=policy, num_blocks=5, max_batch_tokens=12)
    assert rows_of(loop, 3) == [[(0, 8), (1, 4)], [(0, 1)], [(0, 1)]]
    assert [plan.num_starved for plan in loop.plans] == [0, 1, 1]
    assert loop.state.pool.num_free == 1
    loop.run()
    assert not loop.num_resets


@pytest.mark.parametrize("policy", POLICIES)
def test_returned_requests_go_before_fresh_ones(policy: str) -> None:
    loop = started((4, 9), (4, 9), (4, 9), policy=policy, num_blocks=3)
    fresh = loop.add(1, 1)
    plan = loop.step()
    while not plan.soft_resets:
        plan = loop.step()
    assert [reset.uid for reset in plan.soft_resets] == [2, 1]
    assert [waiting.request.uid for waiting in loop.state.waiting] == [1, 2, fresh]
    loop.run()
    order = [uid for rows in loop.rows() for uid, _ in rows]
    assert order.index(fresh) > max(len(order) - order[::-1].index(uid) - 1 for uid in (0, 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_returns_only_when_all_its_known_tokens_fit(policy: str) -> None:
    loop = started((4, 9), (9, 8), policy=policy, num_blocks=4, max_batch_tokens=6)
    returns = 0
    while not loop.state.is_idle:
        free, waiting = loop.state.pool.num_free, {w.request.uid: w.num_tokens for w in loop.state.waiting if w.evicted}
        plan = loop.step()
        for uid in waiting.keys() & set(plan.batch.uid.tolist()):
            returns += 1
            assert waiting[uid] > 6, "the whole of it fits one chunk, which shows nothing"
            assert free >= blocks_for(waiting[uid], 4)
    loop.verify()
    assert returns == loop.num_resets > 0


def test_an_idle_scheduler_plans_nothing() -> None:
    state = initial_state(make_config())
    plan, same = schedule(state)
    assert plan.is_empty
    assert not plan.drain
    assert same is state
    state = add(state, make_request(0, 3, 2))
    state, _ = cancel(state, 0)
    assert schedule(state)[0].is_empty
