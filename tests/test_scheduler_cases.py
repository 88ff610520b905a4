"""Public failures of engines like ours, by their ids, as far as they are the scheduler's."""

from dataclasses import replace

import numpy as np
import pytest
from machines import DEPTHS, POLICIES, Loop, make_config, make_prompt, make_request, solo

from cbjax.scheduler import add, blocks_for, check, initial_state, known_tokens, update


def forward_passes(prompt: int, max_new_tokens: int, budget: int) -> int:
    return blocks_for(prompt, budget) + max_new_tokens - 1


# B10: a request that can never fit waits at the head for ever.


@pytest.mark.parametrize(("prompt", "max_new_tokens", "cells"), [(900, 1, 900), (790, 50, 839), (801, 1, 801)])
def test_B10_what_never_fits_is_refused_with_both_numbers(prompt: int, max_new_tokens: int, cells: int) -> None:
    loop = Loop(make_config(num_blocks=50, block_size=16))
    with pytest.raises(ValueError, match=rf"need {cells} cells .*can hold 800"):
        loop.add(prompt, max_new_tokens)
    check(loop.state)
    loop.add(5, 3)
    loop.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_B10_what_fits_to_the_last_cell_ends_alone_and_the_small_one_too(policy: str) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=50, block_size=16, max_batch_tokens=256))
    loop.add(790, 11)
    loop.add(5, 3)
    loop.run()
    assert not loop.num_resets


# B11: preempt, re-admit, preempt: progress lost each time.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [2, 8, 64])
def test_B11_no_livelock_under_pressure(policy: str, depth: int, budget: int) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=6, max_batch_tokens=budget), depth=depth)
    for _ in range(3):
        loop.add(8, 12)
    loop.run()  # asserts a token between any two resets of the same request
    assert 1 <= loop.num_resets <= 3 * 12
    assert len(loop.plans) <= 3 * forward_passes(8, 12, budget) + sum(
        blocks_for(8 + had, budget) for resets in loop.resets.values() for had in resets
    )


# B12: output after recompute is incomplete, or repeats tokens already streamed.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_B12_each_token_comes_once_after_zero_to_three_resets(policy: str, depth: int) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=7), depth=depth)
    for _ in range(5):
        loop.add(2, 16)
    loop.run()  # asserts the tokens of a run alone
    assert {len(loop.resets[uid]) for uid in loop.requests} == {0, 1, 2, 3}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_B12_a_reset_before_the_first_token_changes_nothing(policy: str, depth: int) -> None:
    loop = Loop(make_config(policy=policy, num_blocks=4, max_batch_tokens=10), depth=depth)
    loop.add(8, 8)
    loop.add(14, 2)
    loop.run()
    assert loop.resets[1] == [0]


# B15: sampling on an unfinished chunk: the token is dropped, the random state has moved.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_B15_draws_are_the_tokens_emitted_whatever_the_chunk(depth: int, num_blocks: int) -> None:
    tokens = set()
    for chunk in (1, 7, 8, 19, 20, 21, 64):
        loop = Loop(make_config(num_blocks=num_blocks, max_batch_tokens=chunk), depth=depth)
        uid = loop.add(make_prompt(20, seed=3), 6)
        loop.add(9, 5)
        loop.run()
        tokens.add(tuple(loop.outputs[uid]))
        for uid in loop.requests:
            batches = [(plan.batch, i) for plan in loop.plans for i in (plan.batch.uid == uid).nonzero()[0]]
            draws = [int(batch.output_index[i]) for batch, i in batches if batch.emits[i]]
            assert draws == list(range(len(loop.outputs[uid])))
            prompt = len(loop.requests[uid].prompt)
            for batch, i in batches:
                end = batch.start[i] + batch.count[i]
                assert batch.emits[i] == (end >= prompt + batch.output_index[i])
    assert len(tokens) == 1


# B30: one step too many for one token; zero becomes the default.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt", [1, 4, 8, 9, 20])
def test_B30_one_token_is_one_step_that_emits_and_no_decode(policy: str, prompt: int, depth: int) -> None:
    loop = Loop(make_config(policy=policy, max_batch_tokens=8), depth=depth)
    loop.add(prompt, 1)
    loop.run()
    assert len(loop.plans) == forward_passes(prompt, 1, budget=8)
    assert sum(int(plan.batch.emits.sum()) for plan in loop.plans) == 1
    assert not any(plan.batch.carried.any() for plan in loop.plans)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_new_tokens", [2, 3, 9])
def test_B30_forward_passes_are_chunks_and_one_decode_for_each_further_token(max_new_tokens: int, depth: int) -> None:
    loop = Loop(make_config(max_batch_tokens=8), depth=depth)
    loop.add(20, max_new_tokens)
    loop.run()
    assert len(loop.plans) == forward_passes(20, max_new_tokens, budget=8)
    assert sum(int(plan.batch.carried.sum()) for plan in loop.plans) == max_new_tokens - 1


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_B30_no_token_or_fewer_is_refused(max_new_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1; got {max_new_tokens}"):
        add(initial_state(make_config()), make_request(0, 4, max_new_tokens))


# B32: EOS as the first token; a second EOS id; which of them it was.


@pytest.mark.parametrize("policy", POLICIES)
def test_B32_eos_as_first_token_frees_the_row_in_that_step(policy: str) -> None:
    loop = Loop(make_config(policy=policy))
    first = solo(make_request(0, 9, 1))[0]
    loop.add(9, 5, eos=(first,))
    loop.add(6, 5)
    loop.step()
    assert loop.outputs[0] == [first]
    assert (loop.ended[0].reason, loop.ended[0].token) == ("stop", first)
    assert loop.state.slot_of(0) is None
    assert loop.state.pool.num_free == loop.config.num_blocks - blocks_for(6, 4)
    assert loop.step().batch.uid.tolist() == [1]
    loop.run()


@pytest.mark.parametrize("depth", DEPTHS)
def test_B32_rows_that_run_in_vain_behind_an_eos_are_dropped(depth: int) -> None:
    expected = solo(make_request(0, 9, 12))
    loop = Loop(make_config(), depth=depth)
    loop.add(9, 12, eos=(expected[4],))
    loop.run()
    assert loop.outputs[0] == expected[:5]
    assert len(loop.plans) == 5 + depth


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_B32_each_of_two_eos_ids_ends_a_request_and_is_named(order: tuple[int, int], depth: int) -> None:
    expected = solo(make_request(0, 9, 12))
    eos = [expected[3], 996 if 996 not in expected else 995]
    loop = Loop(make_config(), depth=depth)
    loop.add(9, 12, eos=(eos[order[0]], eos[order[1]]))
    loop.add(3, 4, eos=(0, 1, 2, 3, 4))  # rows with more ids do not change those with fewer
    loop.run()
    assert loop.outputs[0] == expected[:4]
    assert loop.ended[0].token == expected[3]


def test_B32_eos_on_the_last_token_allowed_is_a_stop() -> None:
    expected = solo(make_request(0, 9, 6))
    loop = Loop(make_config())
    loop.add(9, 6, eos=(expected[5],))
    loop.run()
    assert loop.ended[0].reason == "stop"


# B38: cancel at every moment.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", range(18))
def test_B38_cancel_at_every_moment(policy: str, depth: int, moment: int) -> None:
    """Waiting, in each of three chunks, decoding, ended; with the last result read or not."""
    loop = Loop(make_config(policy=policy, num_blocks=16, max_batch_tokens=8, max_requests_per_batch=2), depth=depth)
    loop.add(20, 5)
    loop.add(6, 9)
    loop.add(7, 4)
    for i in range(moment):
        if i % 2 == 0:
            loop.dispatch()
        elif len(loop.in_flight) > depth:
            loop.collect()
    if moment == 17:  # the last moment lies behind the end, unless too much is in flight to know
        assert (0 in loop.ended) == (depth < 2)
    slot, before = loop.state.slot_of(0), loop.state.pool.num_free
    record = None if slot is None else loop.state.records[slot]
    held = 0 if record is None else record.table.size
    loop.cancel(0)
    assert loop.state.slot_of(0) is None
    assert loop.state.pool.num_free == before + held
    assert not loop.cancel(0)
    assert not loop.cancel(99)
    loop.run()  # asserts no token after the cancel, and that the others equal their solo runs


@pytest.mark.parametrize("field", ["uid", "incarnation"])
def test_B38_an_answer_counts_only_for_the_uid_and_incarnation_that_asked(field: str) -> None:
    loop = Loop(make_config())
    loop.add(5, 3)
    loop.add(6, 3)
    plan = loop.dispatch()
    stale = getattr(plan.batch, field) - np.array([1, 0], np.int32)
    before = replace(plan, batch=replace(plan.batch, **{field: stale}))
    state, results = update(loop.state, before, loop.in_flight[0][1])
    assert results.uid.tolist() == [1]
    assert state.num_in_flight == 0
    slot = state.slot_of(0)
    assert slot is not None
    assert known_tokens(state, slot).tolist() == loop.requests[0].prompt.tolist()


@pytest.mark.parametrize("depth", DEPTHS)
def test_B38_cancelling_all_at_once_leaves_nothing(depth: int) -> None:
    loop = Loop(make_config(num_blocks=8, max_batch_tokens=8, max_requests_per_batch=3), depth=depth)
    for _ in range(6):
        loop.add(9, 6)
    for _ in range(4):
        loop.step()
    for uid in range(6):
        loop.cancel(uid)
    assert loop.state.pool.num_free == 8
    assert not len(loop.state.waiting)
    assert loop.dispatch().is_empty
    loop.run()
    assert not loop.ended


@pytest.mark.parametrize("depth", DEPTHS)
def test_B38_cancel_of_a_victim_that_waits_for_its_return(depth: int) -> None:
    loop = Loop(make_config(num_blocks=6), depth=depth)
    for _ in range(3):
        loop.add(8, 12)
    while not loop.num_resets:
        loop.step()
    (victim, *_) = loop.resets
    loop.cancel(victim)
    fresh = loop.add(8, 12)
    loop.run()
    assert victim in loop.cancelled
    assert victim not in loop.ended
    assert loop.ended[fresh].reason == "length"
