"""Prefix sharing in the scheduler: what is found, what is shared, what is given up. Over the history-hash device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from machines import DEPTHS, Loop, Windows, make_config, make_prompt, make_request, random_script

from cbjax.scheduler import (
    EVICTION_MAPPING,
    Field,
    StepOutputs,
    add,
    check,
    initial_state,
    renew,
    schedule,
    update,
)
from cbjax.scheduler.pool import PoolDraft
from cbjax.scheduler.prefix import Prefix, blake2b_128

POLICIES = list(EVICTION_MAPPING.values())
HASHES = {"128 bits": blake2b_128, "3 bits": lambda content: bytes([content[-4] & 7]), "constant": lambda content: b""}


def make_loop(*, depth: int = 0, **changes) -> Loop:
    return Loop(make_config(shares_blocks=True, **changes), depth=depth)


def run_one(loop: Loop, prompt: Sequence[int] | np.ndarray, new_tokens: int = 4) -> int:
    """Runs a request to its end; returns the tokens that were found for it."""
    uid = loop.add(prompt, new_tokens)
    loop.run()
    (found,) = loop.cached[uid]
    return found


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_b01_a_prompt_that_is_cached_whole_computes_at_least_one_token(length: int) -> None:
    loop = make_loop(block_size=16)
    prompt = make_prompt(length)
    assert run_one(loop, prompt) == 0
    assert run_one(loop, prompt) == (length - 1) // 16 * 16
    longer = np.concatenate([prompt, make_prompt(16, seed=1)])
    assert run_one(loop, longer) == length // 16 * 16


@pytest.mark.parametrize("depth", DEPTHS)
def test_b02_a_victim_that_finds_its_own_blocks_plans_only_what_is_left(depth: int) -> None:
    loop = make_loop(num_blocks=6, depth=depth)
    for seed in range(2):
        loop.add(make_prompt(8, seed), 8)
    loop.run()
    assert loop.num_resets >= 1
    (victim,) = [uid for uid, resets in loop.resets.items() if resets]
    assert loop.cached[victim][-1] > 0, "no block of its own was found"


@pytest.mark.parametrize("hit_first", [True, False])
def test_b04_a_found_block_is_pinned_before_anybody_else_is_served(hit_first: bool) -> None:
    loop = make_loop(num_blocks=4)
    prompt = make_prompt(8)
    run_one(loop, prompt, 1)
    assert loop.state.pool.num_cached == 2
    hit, other = (np.append(prompt, 5), 3), (make_prompt(10, seed=9), 3)
    for ids, new in [hit, other] if hit_first else [other, hit]:
        loop.add(ids, new)
    loop.run()
    if hit_first:
        assert loop.cached[1] == [8]


@pytest.mark.parametrize("shares", [True, False])
def test_b06_a_long_prompt_gives_all_its_tokens_cold_and_warm(shares: bool) -> None:
    loop = Loop(make_config(shares_blocks=shares, num_blocks=128, max_batch_tokens=16))
    found = [run_one(loop, make_prompt(256), 8) for _ in range(2)]
    assert found == [0, 252 if shares else 0]
    assert [len(tokens) for tokens in loop.outputs.values()] == [8, 8]


@pytest.mark.parametrize("eviction", EVICTION_MAPPING)
def test_b14_no_block_leaks_over_2000_requests(eviction: str) -> None:
    rng = np.random.default_rng(0)
    loop = make_loop(num_blocks=24, max_requests_per_batch=4, eviction=EVICTION_MAPPING[eviction])
    shared = make_prompt(12, seed=1)
    for i in range(2000):
        length = int(rng.integers(1, 17))
        prompt = np.concatenate([shared, make_prompt(length, i)]) if rng.random() < 0.5 else make_prompt(length, i)
        uid = loop.add(prompt, int(rng.integers(1, 9)))
        for _ in range(int(rng.integers(0, 4))):
            loop.step()
        if rng.random() < 0.25:
            loop.cancel(uid)
    loop.run()
    pool = loop.state.pool
    assert pool.num_blank + pool.num_cached == 24
    assert not len(pool.holders)
    assert pool.num_cached > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_equal_prompts_of_one_batch_share_their_blocks_once_they_are_computed(depth: int) -> None:
    loop = make_loop(depth=depth)
    prompt = make_prompt(12)
    for _ in range(4):
        loop.add(prompt, 12)
    peak = 0
    while not loop.state.is_idle:
        loop.step()
        peak = max(peak, 64 - loop.state.pool.num_free)
        if loop.outputs[3] and not loop.in_flight:
            tables = [record.table[0, :3].tolist() for record in loop.state.records if record]
            assert all(table == tables[0] for table in tables)
    loop.verify()
    # 24 without sharing. The first step computes all four, and each may take one block more before they are compared.
    assert peak <= 4 * 4
    assert loop.num_resets == 0


def test_requests_that_come_later_share_the_blocks_of_one_that_runs() -> None:
    loop = make_loop()
    prompt = make_prompt(16)
    loop.add(prompt, 20)
    for _ in range(3):
        loop.step()
    uid = loop.add(np.append(prompt, 3), 2)
    loop.step()
    assert loop.cached[uid] == [16]
    assert sorted(dict(loop.state.pool.holders.items()).values()) == [2] * 4
    loop.run()


def test_what_a_request_generated_is_found_by_one_that_continues_it() -> None:
    loop = make_loop()
    run_one(loop, prompt := make_prompt(6), 12)
    continued = np.concatenate([prompt, loop.outputs[0], make_prompt(3, seed=4)])
    # The last token was never fed back, so its KV does not exist.
    assert run_one(loop, continued) == (6 + 12 - 1) // 4 * 4


@pytest.mark.parametrize(("eviction", "found"), [("arc", [4, 8]), ("lru", [4, 8]), ("lifo", [8, 4])])
def test_the_policy_says_whose_end_is_given_up_first(eviction: str, found: list[int]) -> None:
    """Two prompts of 3 blocks are cached in a pool of 7; a third request needs 3 blocks, one of which is blank."""
    loop = make_loop(num_blocks=7, eviction=EVICTION_MAPPING[eviction])
    old, new = make_prompt(12, seed=1), make_prompt(12, seed=2)
    run_one(loop, old, 1)
    run_one(loop, new, 1)
    assert (loop.state.pool.num_blank, loop.state.pool.num_cached) == (1, 6)
    run_one(loop, make_prompt(11, seed=3), 1)
    state = loop.state
    asked = []
    for uid, prompt in enumerate((old, new), start=10):
        plan, _ = schedule(add(state, make_request(uid, prompt, 1)))
        asked += [admission.num_cached for admission in plan.admitted]
    assert asked == found


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_hash_however_bad_changes_an_output(name: str, depth: int) -> None:
    loops = [random_script(seed, depth, shares_blocks=True, block_hash=HASHES[name]) for seed in range(10)]
    # Under one key for everything only the last block can be found, which seldom begins a prompt.
    found = sum(sum(map(sum, loop.cached.values())) for loop in loops)
    assert found > 0 or name == "constant", "nothing was ever found"


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 3, 9), (8, 8)])
@pytest.mark.parametrize("depth", [0, 2])
def test_random_scripts_that_share_prefixes_equal_solo_runs(windows: Windows, depth: int) -> None:
    loops = [
        random_script(seed, depth, windows, shares_blocks=True, eviction=POLICIES[seed % len(POLICIES)])
        for seed in range(30)
    ]
    assert sum(sum(map(sum, loop.cached.values())) for loop in loops) > 0, "nothing was ever found"
    # Windows alone hold so little that hardly anybody is evicted.
    assert None not in windows or sum(loop.num_resets for loop in loops) > 5, "nobody was ever evicted"


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (None, 3, 9), (8, 8)])
@pytest.mark.parametrize("name", HASHES)
def test_many_random_scripts_that_share_prefixes_equal_solo_runs(windows: Windows, name: str) -> None:
    found = 0
    for seed in range(1000, 1400):
        eviction = POLICIES[seed % len(POLICIES)]
        loop = random_script(seed, seed % 4, windows, shares_blocks=True, eviction=eviction, block_hash=HASHES[name])
        found += sum(map(sum, loop.cached.values()))
    assert found > 0 or name == "constant", "nothing was ever found"


@pytest.mark.parametrize("window", [6, 8, 9])
def test_b09_a_hit_in_a_window_group_needs_only_the_last_window(window: int) -> None:
    loop = make_loop(windows=(None, window), max_batch_tokens=5)
    prompt = make_prompt(24)
    assert run_one(loop, prompt) == 0
    assert run_one(loop, np.concatenate([prompt, make_prompt(5, seed=1)])) == 24
    uid = loop.add(np.concatenate([prompt, make_prompt(9, seed=2)]), 4)
    loop.step()
    record = next(record for record in loop.state.records if record is not None)
    left = (24 - window + 1) // 4
    assert (record.table[1, :left] == 64).all(), "blocks before the window are held"
    assert (record.table[0, :6] < 64).all()
    assert loop.cached[uid] == [24]
    loop.run()


def test_a_hit_is_shortened_to_where_every_window_is_whole() -> None:
    """The blocks of the windows' last columns are gone, those further before are not."""
    loop = make_loop(windows=(None, 6), max_batch_tokens=64)
    prompt = make_prompt(24)
    run_one(loop, prompt, 1)
    pool = loop.state.pool
    depths = {block: _depth(name.prefix) for block, name in pool.index.registered().items() if name.group == 1}
    victim = max(depths, key=lambda block: depths[block])
    draft = PoolDraft(pool)
    draft.forget(victim)
    loop.state = replace(loop.state, pool=draft.freeze())
    check(loop.state)
    assert run_one(loop, np.append(prompt, 1)) == (depths[victim] - 1) * 4


def _depth(prefix: Prefix) -> int:
    return 0 if prefix.parent is None else 1 + _depth(prefix.parent)


def test_b08_new_weights_find_nothing_of_the_old_ones() -> None:
    loop = make_loop()
    prompt = make_prompt(20)
    run_one(loop, prompt)
    loop.state = renew(loop.state)
    check(loop.state)
    assert loop.state.pool.num_cached == 0
    assert run_one(loop, prompt) == 0
    assert run_one(loop, prompt) == 16


def test_b08_blocks_of_a_request_that_ran_across_new_weights_are_never_found() -> None:
    loop = make_loop()
    prompt = make_prompt(20)
    for _ in range(2):
        loop.add(prompt, 12)
    for _ in range(3):
        loop.step()
    assert len(loop.state.pool.holders)
    loop.state = renew(loop.state)
    check(loop.state)
    loop.run()
    assert loop.state.pool.num_cached == 0
    assert run_one(loop, prompt) == 0


def test_namespaces_share_nothing() -> None:
    loop = make_loop()
    prompt = make_prompt(20)
    found = []
    for salt in (b"a", b"b", b"a"):
        uid = len(loop.requests)
        request = replace(make_request(uid, prompt, 4), namespace=salt)
        loop.state = add(loop.state, request)
        loop.requests[uid], loop.outputs[uid] = request, []
        loop.run()
        found += loop.cached[uid]
    assert found == [0, 0, 16]


def test_rows_whose_logits_were_not_finite_register_nothing() -> None:
    state = add(initial_state(make_config(shares_blocks=True)), make_request(0, 12, 4))
    plan, state = schedule(state)
    nothing = np.zeros(1)
    outputs = StepOutputs(
        tokens=nothing.astype(np.int32), logprobs=nothing.astype(np.float32), finite=np.zeros(1, bool)
    )
    state, results = update(state, plan, outputs)
    assert [ended.reason for ended in results.ended] == ["failed"]
    assert state.pool.num_blank == 64
    assert not state.pool.index.registered()


def test_without_sharing_nothing_is_registered() -> None:
    loop = Loop(make_config())
    assert [run_one(loop, make_prompt(20)) for _ in range(2)] == [0, 0]
    assert loop.state.pool.num_cached == 0
    assert not loop.state.rows[Field.REGISTERED].any()


def test_cached_blocks_count_as_free_for_admission() -> None:
    """transformers holds a request back although cached blocks would do."""
    loop = make_loop(num_blocks=8, safety_margin=0.5)
    run_one(loop, make_prompt(27), 1)
    assert (loop.state.pool.num_blank, loop.state.pool.num_cached) == (2, 6)
    loop.add(make_prompt(4, seed=1), 8)
    loop.step()
    uid = loop.add(make_prompt(8, seed=2), 4)
    loop.step()
    assert loop.cached[uid] == [0], "held back although 7 of 8 blocks can be handed out"
    loop.run()
