"""The scheduler under random orders of add, cancel, dispatch and collect, on pools that overfill at once.

After every transition `check(state)` holds; every token is compared with the request's solo run; a request ends once.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from machines import DEPTHS, POLICIES, Loop, Windows, make_config, make_prompt, random_script

from cbjax.scheduler import EVICTION_MAPPING

# Layer groups: with a full one, of windows alone, shorter than a block, and two of the same window.
WINDOWS = ((None, 6), (5,), (None, 2, 9), (8, 8))


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the pool, the depth, and what happens next."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([4, 5]),
        max_batch_tokens=st.sampled_from([1, 3, 8, 32]),
        rows=st.sampled_from([1, 2, 4, 8]),
        margin=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
        depth=st.sampled_from(DEPTHS),
        windows=st.sampled_from([(None,), (None,), *WINDOWS]),
        shares=st.booleans(),
        eviction=st.sampled_from(list(EVICTION_MAPPING.values())),
        host_blocks=st.sampled_from([0, 0, 4, 100]),
    )
    def start(
        self,
        policy,
        num_blocks,
        block_size,
        max_batch_tokens,
        rows,
        margin,
        depth,
        windows,
        shares,
        eviction,
        host_blocks,
    ) -> None:
        config = make_config(
            policy=policy,
            windows=windows,
            num_blocks=num_blocks * len(windows),
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=rows,
            safety_margin=margin,
            shares_blocks=shares,
            eviction=eviction,
            host_blocks=host_blocks,
        )
        self.loop = Loop(config, depth=depth)

    @rule(data=st.data(), eos=st.sampled_from([0, 0, 100]), common=st.sampled_from([0, 0, 4, 9, 20]))
    def add(self, data, eos, common) -> None:
        cells = self.loop.config.max_request_tokens
        length = data.draw(st.integers(1, min(20, cells)))
        own = make_prompt(20, seed=len(self.loop.requests) + 1)
        prompt = np.concatenate([make_prompt(20, seed=0)[:common], own])[:length]
        self.loop.add(prompt, data.draw(st.integers(1, min(20, cells - length + 1))), tuple(range(eos)))

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data(), times=st.integers(1, 4))
    def fork(self, data, times) -> None:
        parent = self.loop.requests[data.draw(st.integers(0, len(self.loop.requests) - 1))]
        for _ in range(times):
            self.loop.add(parent.prompt, parent.max_new_tokens, parent.eos_token_ids, fork_of=parent.family)

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.loop.cancel(data.draw(st.integers(0, len(self.loop.requests))))

    @precondition(lambda self: len(self.loop.in_flight) <= self.loop.depth)
    @rule()
    def dispatch(self) -> None:
        self.loop.dispatch()

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def collect(self) -> None:
        self.loop.collect()

    @rule(times=st.integers(1, 6))
    def steps(self, times) -> None:
        for _ in range(times):
            self.loop.step()

    def teardown(self) -> None:
        self.loop.run()


def explore(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_add_cancel_dispatch_and_collect() -> None:
    explore(max_examples=100, steps=30)


@pytest.mark.slow
def test_any_order_of_add_cancel_dispatch_and_collect_at_length() -> None:
    explore(max_examples=2000, steps=60)


@pytest.mark.parametrize("depth", DEPTHS)
def test_random_scripts_equal_solo_runs(depth: int) -> None:
    loops = [random_script(seed, depth) for seed in range(120)]
    # The scripts do what they are for.
    assert sum(loop.num_resets for loop in loops) > 50
    assert sum(len(loop.cancelled) for loop in loops) > 20
    assert sum(ended.reason == "stop" for loop in loops for ended in loop.ended.values()) > 20
    assert (sum(loop.num_drains for loop in loops) > 0) == (depth > 0)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_random_scripts_with_windows_equal_solo_runs(windows: Windows, depth: int) -> None:
    loops = [random_script(seed, depth, windows) for seed in range(30)]
    left = sum(int((plan.table.block == loop.config.num_blocks).sum()) for loop in loops for plan in loop.plans)
    assert left > 50
    assert sum(loop.num_resets for loop in loops) > 3 or None not in windows


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_many_random_scripts_with_windows_equal_solo_runs(windows: Windows, depth: int) -> None:
    for seed in range(1000, 2000):
        random_script(seed, depth, windows)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_many_random_scripts_equal_solo_runs(depth: int) -> None:
    for seed in range(1000, 3000):
        random_script(seed, depth)
