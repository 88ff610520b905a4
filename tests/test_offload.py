"""Offload under KV pressure in the scheduler: who goes to host memory, when it comes back, what is left there."""

import pytest
from machines import DEPTHS, Loop, Windows, make_config, make_prompt, random_script

from cbjax.scheduler import check, renew

WINDOWS: list[Windows] = [(None,), (None, 6), (5,), (None, 3, 9)]


def pressed(**changes) -> Loop:
    """B11: three requests that need 5 blocks each, and 6 blocks."""
    loop = Loop(make_config(**{"num_blocks": 6, "host_blocks": 100} | changes))
    for seed in range(3):
        loop.add(make_prompt(8, seed), 12)
    return loop


def test_b11_a_victim_resumes_without_computing_anything_again() -> None:
    loop = pressed().run()
    assert loop.num_offloads == loop.num_resets > 0
    assert not any(plan.soft_resets for plan in loop.plans)
    computed = sum(plan.batch.num_tokens for plan in loop.plans)
    assert computed == 3 * (8 + 12 - 1)
    restored = [admission.num_restored for plan in loop.plans for admission in plan.admitted]
    assert sum(restored) > 0


def test_b11_without_room_in_host_memory_a_victim_is_soft_reset() -> None:
    loop = pressed(host_blocks=1).run()
    assert loop.num_offloads == 0
    assert loop.num_resets > 0


def test_with_room_for_some_victims_the_others_are_soft_reset() -> None:
    loop = Loop(make_config(num_blocks=12, host_blocks=3))
    for seed in range(6):
        loop.add(make_prompt(8, seed), 12)
    loop.run()
    assert 0 < loop.num_offloads < loop.num_resets


def test_the_cancel_of_an_offloaded_request_gives_host_memory_back() -> None:
    loop = pressed()
    while not loop.num_offloads:
        loop.step()
    (uid,) = [entry.request.uid for entry in loop.state.waiting if entry.saved is not None]
    assert loop.state.host_used > 0
    loop.cancel(uid)
    assert loop.state.host_used == 0
    loop.run()


def test_what_is_still_cached_does_not_come_back_from_host_memory() -> None:
    """A victim's full blocks are registered; those that nobody took meanwhile are found."""
    loop = pressed(shares_blocks=True).run()
    back = [admission for plan in loop.plans for admission in plan.admitted if admission.incarnation]
    assert any(admission.num_cached for admission in back)
    restored = sum(len(restore.blocks) for plan in loop.plans for restore in plan.restores)
    saved = sum(len(offload.blocks) for plan in loop.plans for offload in plan.offloads)
    assert restored < saved
    assert sum(plan.batch.num_tokens for plan in loop.plans) <= 3 * (8 + 12 - 1)


def test_copies_of_old_weights_are_dropped() -> None:
    loop = pressed()
    while not loop.num_offloads:
        loop.step()
    loop.state = renew(loop.state)
    check(loop.state)
    assert loop.state.host_used == 0
    loop.device.copies.clear()
    loop.run()
    assert sum(plan.batch.num_tokens for plan in loop.plans) > 3 * (8 + 12 - 1)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_scripts_with_offload_equal_solo_runs(windows: Windows, depth: int) -> None:
    loops = [
        random_script(seed, depth, windows, shares_blocks=bool(seed % 2), host_blocks=4 * (seed % 5))
        for seed in range(20)
    ]
    assert None not in windows or sum(loop.num_offloads for loop in loops) > 3


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_many_random_scripts_with_offload_equal_solo_runs(windows: Windows, depth: int) -> None:
    for seed in range(2000, 2200):
        random_script(seed, depth, windows, shares_blocks=bool(seed % 2), host_blocks=4 * (seed % 5))
