"""The design's invariants 1, 3, 4 and 5, as far as they are the scheduler's."""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from machines import (
    DEPTHS,
    POLICIES,
    Loop,
    constant_answers,
    make_config,
    make_prompt,
    make_request,
    random_script,
)

from cbjax.descriptor import build
from cbjax.scheduler import (
    BlockPool,
    Field,
    SchedulerState,
    add,
    cancel,
    check,
    initial_state,
    known_tokens,
    schedule,
    update,
)
from cbjax.scheduler.draft import Draft
from cbjax.scheduler.sharing import find


def running_state(num_requests: int = 3) -> SchedulerState:
    """Requests in the middle of their decodes, one more waiting."""
    loop = Loop(make_config(num_blocks=16, max_requests_per_batch=num_requests))
    for _ in range(num_requests + 1):
        loop.add(6, 8)
    for _ in range(4):
        loop.step()
    assert loop.state.num_active == num_requests
    assert len(loop.state.waiting) == 1
    return loop.state


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 3, 9), (None, None)])
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_1_conservation_with_layer_groups(policy: str, windows: tuple[int | None, ...]) -> None:
    """Counted here without `check`; the entries a plan writes are the tables, in every group."""
    num_groups = len(windows)
    rng, num_resets = random.Random(num_groups), 0
    for seed in range(25):
        config = make_config(
            policy=policy, num_blocks=6 * num_groups + 1, windows=windows, max_batch_tokens=rng.choice([3, 9, 40])
        )
        state, in_flight, to_come = initial_state(config), deque(), deque(range(8))
        device_table = np.full((num_groups, config.max_requests_per_batch, config.max_blocks_per_request), -1)
        while to_come or not state.is_idle:
            if to_come:
                size = rng.randint(1, 14)
                state = add(state, make_request(to_come.popleft(), size, rng.randint(1, 25 - size)))
            if rng.random() < 0.05:
                state, _ = cancel(state, rng.randrange(8))
            plan, state = schedule(state)
            num_resets += len(plan.soft_resets)
            delta = plan.table
            device_table[delta.group, delta.slot, delta.column] = delta.block
            held = []
            for slot, record in enumerate(state.records):
                if record is not None:
                    held += record.table[record.table != config.num_blocks].tolist()
                    written = device_table[:, slot, : record.table.shape[1]]
                    assert np.array_equal(written, record.table)
            assert len(set(held)) == len(held), "a block has two owners"
            assert set(held) | set(state.pool.free_ids().tolist()) == set(range(config.num_blocks))
            assert len(held) + state.pool.num_free == config.num_blocks
            if not plan.is_empty:
                in_flight.append(plan)
            while in_flight and (plan.is_empty or len(in_flight) > seed % 4):
                state, _ = update(state, in_flight[0], constant_answers(in_flight.popleft()))
            check(state)
        assert state.pool.num_free == config.num_blocks
    # Where every group has a window, rows give back a block whenever they take one.
    assert num_resets > 5 or None not in windows


def test_invariant_1_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool.full(3)
    assert pool.take(4) is None
    assert pool.num_free == 3
    loop = Loop(make_config(num_blocks=5, max_batch_tokens=12))
    loop.add(8, 6)
    loop.add(16, 2)
    loop.step()
    before = loop.state
    plan = loop.step()  # the second request wants 3 blocks, and one is left
    assert plan.num_starved == 1
    slot = before.slot_of(1)
    assert slot is not None
    assert np.array_equal(loop.state.rows[:, slot], before.rows[:, slot])
    assert loop.state.pool.num_free == before.pool.num_free - 1
    assert plan.table.slot.tolist() == [loop.state.slot_of(0)]
    loop.run()


def test_invariant_1_is_what_check_looks_at() -> None:
    state = running_state()
    check(state)
    taken = state.pool.take(1)
    assert taken is not None
    with pytest.raises(AssertionError, match="blocks"):
        check(replace(state, pool=taken[0]))
    record = state.records[0]
    assert record is not None
    twice = state.pool.take(2)
    assert twice is not None
    with pytest.raises(AssertionError, match="held twice"):
        check(replace(state, pool=twice[0].give_back(record.table[0, :2])))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(
    "field", [Field.UID, Field.PROMPT, Field.PREFILL, Field.LENGTH, Field.HELD, Field.DRAWN, Field.ACTIVE]
)
def test_check_notices_a_row_that_does_not_add_up(field: Field, change: int) -> None:
    state = running_state()
    rows = state.rows.copy()
    rows[field, 1] += change
    with pytest.raises(AssertionError):
        check(replace(state, rows=rows))


@pytest.mark.parametrize("change", [-4, 4])
def test_check_notices_blocks_held_in_vain_or_lacking(change: int) -> None:
    state = running_state()
    rows = state.rows.copy()
    rows[Field.COMPUTED, 1] += change
    with pytest.raises(AssertionError, match="held in vain or lacking"):
        check(replace(state, rows=rows))


def test_check_notices_a_request_in_two_places_and_a_slot_without_a_record() -> None:
    state = running_state()
    record = state.records[0]
    assert record is not None
    with pytest.raises(AssertionError, match="two places"):
        check(add(state, record.request))
    with pytest.raises(AssertionError):
        check(replace(state, records=(None, *state.records[1:])))
    tail = state.tail + 1
    with pytest.raises(AssertionError):
        check(replace(state, records=(record._replace(history=tail[0]), *state.records[1:])))


def test_invariant_3_no_allocator_hands_out_a_reserved_block() -> None:
    """Case B19, too: a pool filled to the last block names every id below `num_blocks` once, and none beyond."""
    loop = Loop(make_config(num_blocks=12, max_requests_per_batch=4))
    for _ in range(4):
        loop.add(12, 1)
    loop.dispatch()
    assert loop.state.pool.num_free == 0
    assert sorted(loop.plans[0].table.block.tolist()) == list(range(12))
    loop.run()
    for seed in range(20):
        loop = random_script(seed, depth=seed % 4)
        named = np.concatenate([plan.table.block for plan in loop.plans])
        assert ((named >= 0) & (named < loop.config.num_blocks)).all()


def test_invariant_3_padding_names_the_trash_slot_and_reads_nothing() -> None:
    loop = Loop(make_config(max_requests_per_batch=5))
    loop.add(3, 2)
    plan = loop.dispatch()
    descriptor = build(plan.batch, loop.ladder.buckets[-1], num_slots=5)
    rows = plan.batch.num_rows
    assert len(descriptor.slot) > rows
    assert (descriptor.slot[rows:] == 5).all()
    assert not descriptor.context_len[rows:].any()
    assert not np.diff(descriptor.q_start)[rows:].any()
    assert not descriptor.emits[rows:].any()


@pytest.mark.parametrize("depth", DEPTHS)
def test_invariant_4_tokens_depend_on_the_request_alone(depth: int) -> None:
    seen = set()
    for policy in POLICIES:
        for mates, num_blocks, block_size, budget in [
            (0, 64, 4, 64), (3, 64, 4, 64), (5, 64, 16, 7), (4, 6, 4, 64), (6, 7, 5, 5), (2, 6, 4, 1)
        ]:  # fmt: skip
            config = make_config(policy=policy, num_blocks=num_blocks, block_size=block_size, max_batch_tokens=budget)
            loop = Loop(config, depth=depth)
            first = loop.add(make_prompt(9, seed=1), 12)
            for _ in range(mates):
                loop.add(8, 10)
            for _ in range(3):
                loop.step()
            if mates:
                loop.cancel(1)
            seen.add(tuple(loop.run().outputs[first]))
    assert len(seen) == 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_5_progress_with_bounded_evictions(policy: str, depth: int) -> None:
    """Eight requests that each need the whole pool: all end, and no eviction comes without a new token."""
    loop = Loop(make_config(policy=policy, num_blocks=5, max_batch_tokens=7), depth=depth)
    for uid in range(8):
        prompt = 1 + 2 * uid
        loop.add(prompt, 21 - prompt)
    loop.run()  # asserts one end each, and at least one token between two evictions of the same request
    assert loop.num_resets >= 3
    assert loop.num_resets <= sum(map(len, loop.outputs.values())) + len(loop.requests)


@pytest.mark.parametrize(
    ("num_blocks", "budget", "sizes"),
    [
        (8, 4, [(1, 10), (8, 18), (12, 8)]),
        (7, 3, [(4, 20), (8, 19), (12, 2), (12, 17), (2, 24)]),
        (6, 3, [(2, 23), (1, 10), (2, 10), (1, 8)]),
        (9, 5, [(1, 21), (2, 12), (12, 20), (1, 9)]),
        (12, 4, [(4, 20), (12, 22), (1, 17), (1, 24)]),
    ],
)
def test_invariant_5_a_returned_request_is_spared_while_decodes_take_its_blocks(
    num_blocks: int, budget: int, sizes: list[tuple[int, int]]
) -> None:
    """Its prefill gets the few tokens that the decodes leave, and they take the blocks that it was let in on."""
    loop = Loop(make_config(num_blocks=num_blocks, max_batch_tokens=budget))
    for prompt, max_new_tokens in sizes:
        loop.add(prompt, max_new_tokens)
    loop.run()  # asserts a token between any two resets of the same request
    assert loop.num_resets >= 2


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_5_a_half_done_prefill_and_a_decode_that_starve_each_other(policy: str) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=4, max_batch_tokens=10))
    loop.add(8, 8)
    loop.add(14, 2)
    loop.run()
    assert loop.resets[1][0] == 0, "the prefill was not evicted before its first token"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [4, 5])
def test_invariant_5_two_half_done_prefills_that_starve_each_other(policy: str, num_blocks: int) -> None:
    """A chunk takes all that is left of a step, so no plan leads here; a draft is led here by hand."""
    loop = Loop(make_config(policy=policy, num_blocks=num_blocks))
    for _ in range(2):
        loop.add(16, 1)
    draft = Draft(loop.state)
    for _ in range(2):
        head = draft.waiting.head()
        assert head is not None
        slot = draft.admit(head, find(draft, head))
        assert draft.take_blocks(slot, 2)
        draft.choose(np.array([slot]), np.array([8], np.int32))
    batch, delta = draft.batch(), draft.table_delta()
    loop.state = replace(draft.freeze(in_flight=()), in_flight=())
    check(loop.state)
    loop.device.update_table(delta)
    bucket = loop.ladder.select(batch)
    loop.device.forward(build(batch, bucket, loop.config.max_requests_per_batch), bucket)
    plan = loop.step()
    assert [reset.uid for reset in plan.soft_resets] == [1]
    assert plan.batch.uid.tolist() == [0]
    loop.run()
    assert loop.num_resets == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_invariant_5_the_last_active_request_is_never_a_victim(policy: str) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=4, max_batch_tokens=7))
    for uid in range(6):
        loop.add(2 + uid, 9)
    loop.run()
    relieved = [plan.batch for plan in loop.plans if plan.soft_resets]
    assert relieved
    assert all((batch.start > 0).any() for batch in relieved), "nobody who kept its blocks runs"
    loop = Loop(make_config(policy=policy, num_blocks=3, max_batch_tokens=2))
    loop.add(5, 8)
    loop.run()
    assert not loop.num_resets


def test_invariant_5_what_can_never_fit_is_refused_with_both_numbers() -> None:
    state = initial_state(make_config(num_blocks=6, max_blocks_per_request=5))
    with pytest.raises(ValueError, match=r"14 prompt tokens and 8 new ones need 21 cells.* can hold 20"):
        add(state, make_request(0, 14, 8))
    with pytest.raises(ValueError, match=r"need 9 cells.* can hold 8"):
        add(initial_state(make_config(num_blocks=5, windows=(None, None))), make_request(0, 9, 1))
    check(add(state, make_request(0, 14, 7)))
    Loop(make_config(num_blocks=5)).add(14, 7)


def test_empty_prompts_and_no_outputs_are_refused() -> None:
    state = initial_state(make_config())
    with pytest.raises(ValueError, match="at least one token; got none"):
        add(state, make_request(0, [], 4))
    for none in (0, -1):
        with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1; got {none}"):
            add(state, make_request(0, 3, none))


def test_known_tokens_are_prompt_and_outputs_at_every_length() -> None:
    loop = Loop(make_config(num_blocks=12, block_size=5))
    loop.add(7, 30)
    loop.step()
    while not loop.state.is_idle:
        slot = loop.state.slot_of(0)
        assert slot is not None
        assert known_tokens(loop.state, slot).tolist() == [*loop.requests[0].prompt.tolist(), *loop.outputs[0]]
        loop.step()
    loop.verify()
