"""Forks in the scheduler: a prompt with several continuations is computed once. Over the history-hash device."""

import pytest
from machines import DEPTHS, Loop, Windows, make_config, make_prompt, random_script

SHARING = pytest.mark.parametrize("shares", [True, False], ids=["sharing", "no sharing"])


def family(loop: Loop, prompt_tokens: int, count: int, new_tokens: int = 6) -> list[int]:
    """Submits `count` continuations of one prompt; their sampler words differ, as seeds do."""
    prompt = make_prompt(prompt_tokens)
    parent = loop.add(prompt, new_tokens)
    return [parent, *(loop.add(prompt, new_tokens, fork_of=parent) for _ in range(count - 1))]


def computed(loop: Loop) -> int:
    return sum(plan.batch.num_tokens for plan in loop.plans)


@SHARING
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("prompt_tokens", [2, 4, 5, 8, 11])
def test_b25_the_prompt_is_computed_once_and_the_streams_differ(prompt_tokens: int, depth: int, shares: bool) -> None:
    loop = Loop(make_config(shares_blocks=shares), depth=depth)
    uids = family(loop, prompt_tokens, 4)
    loop.run()
    assert len({tuple(loop.outputs[uid]) for uid in uids}) == 4
    # Each computes the prompt's last token and all but the last of its own.
    assert computed(loop) == prompt_tokens - 1 + 4 * 6
    assert [loop.cached[uid] for uid in uids] == [[0], *[[prompt_tokens - 1]] * 3]


@SHARING
def test_full_blocks_are_shared_and_the_block_that_is_not_full_is_copied(shares: bool) -> None:
    loop = Loop(make_config(shares_blocks=shares))
    uids = family(loop, 11, 3)
    loop.step()
    loop.step()
    tables = [loop.state.records[loop.state.slot_of(uid)].table[0].tolist() for uid in uids]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert sorted(dict(loop.state.pool.holders.items()).values()) == [3, 3]
    assert loop.num_copies == 2
    loop.run()


def test_a_prompt_that_ends_with_a_block_needs_no_copy() -> None:
    loop = Loop(make_config())
    family(loop, 9, 3)
    loop.run()
    assert loop.num_copies == 0


def test_b25_a_prompt_of_one_token_has_nothing_to_share() -> None:
    loop = Loop(make_config())
    uids = family(loop, 1, 3)
    loop.run()
    assert len({tuple(loop.outputs[uid]) for uid in uids}) == 3
    assert len(loop.plans) == 6


@SHARING
@pytest.mark.parametrize("count", [4, 5, 12])
def test_b25_more_continuations_than_rows_queue_and_complete(count: int, shares: bool) -> None:
    loop = Loop(make_config(max_requests_per_batch=4, shares_blocks=shares))
    uids = family(loop, 10, count)
    loop.run()
    assert len({tuple(loop.outputs[uid]) for uid in uids}) == count


@SHARING
@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_b25_a_cancel_frees_exactly_its_own(cancelled: int, shares: bool) -> None:
    loop = Loop(make_config(shares_blocks=shares))
    uids = family(loop, 10, 3)
    for _ in range(3):
        loop.step()
    held = 64 - loop.state.pool.num_free
    loop.cancel(uids[cancelled])
    # Two full blocks stay with the others; each has a block or two of its own.
    assert 0 < held - (64 - loop.state.pool.num_free) <= 2
    loop.run()
    assert loop.cancelled == {uids[cancelled]}


def test_b25_the_others_go_on_when_the_first_ends_at_once() -> None:
    loop = Loop(make_config())
    prompt = make_prompt(10)
    parent = loop.add(prompt, 6, eos=tuple(range(997)))
    children = [loop.add(prompt, 6, fork_of=parent) for _ in range(2)]
    loop.run()
    assert len(loop.outputs[parent]) == 1
    assert all(len(loop.outputs[child]) == 6 for child in children)


def test_the_cancel_of_a_waiting_parent_leaves_its_continuations() -> None:
    loop = Loop(make_config(max_requests_per_batch=1))
    loop.add(3, 9)
    loop.step()
    uids = family(loop, 10, 3)
    loop.cancel(uids[0])
    loop.run()
    assert all(len(loop.outputs[uid]) == 6 for uid in uids[1:])


@pytest.mark.parametrize("window", [3, 6, 64])
def test_window_groups_fork_as_long_as_the_window_is_there(window: int) -> None:
    loop = Loop(make_config(windows=(None, window)))
    family(loop, 11, 3)
    loop.run()
    assert computed(loop) == 10 + 3 * 6


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_random_scripts_with_forks_equal_solo_runs(windows: Windows, depth: int) -> None:
    loops = [
        random_script(seed, depth, windows, forks=True, shares_blocks=bool(seed % 2), host_blocks=6 * (seed % 3))
        for seed in range(9)
    ]
    assert sum(loop.num_copies for loop in loops) > 5


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 3, 9)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_many_random_scripts_with_forks_equal_solo_runs(windows: Windows, depth: int) -> None:
    for seed in range(3000, 3200):
        random_script(seed, depth, windows, forks=True, shares_blocks=bool(seed % 2), host_blocks=6 * (seed % 3))
