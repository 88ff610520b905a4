"""Eviction policies: the order of cached blocks, the ghosts of those that were taken, and what each policy keeps."""

from collections.abc import Iterable
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from machines import DEPTHS, Loop, make_config, make_prompt, random_script

from cbjax.scheduler import EVICTION_MAPPING, EvictionPolicy, SchedulerState, eviction_named
from cbjax.scheduler.eviction_ghosts import Ghosts
from cbjax.scheduler.eviction_order import DEMOTED, FRESH, PROTECTED, EvictionOrder
from cbjax.scheduler.prefix import blake2b_128

NUM_BLOCKS = 300
POLICIES = list(EVICTION_MAPPING.values())
LEAF_FIRST = [policy for policy in POLICIES if policy.leaf_first]


def listed(order: EvictionOrder) -> list[int]:
    """All blocks, those on probation first, from a copy."""
    return order.writable().take_oldest(order.size)


class OrderMachine(RuleBasedStateMachine):
    """An order beside two plain lists; every order that was frozen must stay what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(NUM_BLOCKS)
        self.marks = [FRESH] * NUM_BLOCKS
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.frozen: list[tuple[EvictionOrder, list[int]]] = []

    @property
    def expected(self) -> list[int]:
        return self.probation + self.protected

    def absent(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if block not in self.expected]

    def append(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            (self.protected if self.marks[block] == PROTECTED else self.probation).append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            (self.protected if block in self.protected else self.probation).remove(block)

    @rule(data=st.data(), count=st.integers(0, 60))
    def give_up(self, data, count) -> None:
        blocks = data.draw(st.permutations(self.absent()))[:count]
        self.order.add(blocks)
        self.append(blocks)

    @rule(data=st.data(), mark=st.sampled_from([FRESH, PROTECTED]))
    def mark(self, data, mark) -> None:
        if absent := self.absent():
            for block in data.draw(st.lists(st.sampled_from(absent), max_size=30)):
                self.order.mark(block, mark)
                self.marks[block] = mark

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data) -> None:
        block = data.draw(st.sampled_from(self.expected))
        assert block in self.order
        self.order.remove(block)
        self.forget([block])
        assert block not in self.order

    @rule(count=st.integers(0, 40))
    def take_oldest(self, count) -> None:
        expected = self.expected[:count]
        assert self.order.take_oldest(min(count, self.order.size)) == expected
        self.forget(expected)

    @precondition(lambda self: not self.protected)
    @rule(count=st.integers(0, 40))
    def take_newest(self, count) -> None:
        expected = self.probation[::-1][:count]
        assert self.order.take_newest(min(count, self.order.size)) == expected
        self.forget(expected)

    @rule(count=st.integers(0, 40))
    def demote(self, count) -> None:
        self.order.demote(count)
        demoted, self.protected = self.protected[:count], self.protected[count:]
        self.probation += demoted
        for block in demoted:
            self.marks[block] = DEMOTED

    @rule()
    def freeze(self) -> None:
        self.frozen.append((self.order.freeze(), list(self.expected)))
        self.order = self.order.writable()

    def teardown(self) -> None:
        self.freeze()
        for order, expected in self.frozen:
            assert listed(order) == expected
            assert order.size == len(expected)
            assert sorted(order.blocks().tolist()) == sorted(expected)
        assert self.order.marks.tolist() == self.marks
        self.order.demote(0)
        assert self.order.num_protected == len(self.protected)


def explore(machine: type[RuleBasedStateMachine], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_order_is_that_in_which_blocks_were_given_up_in_each_segment() -> None:
    explore(OrderMachine, 40)


@pytest.mark.slow
def test_the_order_under_many_more_operations() -> None:
    explore(OrderMachine, 1000)


def keys(count: int, start: int = 0) -> list[bytes]:
    return [blake2b_128(i.to_bytes(4)) for i in range(start, start + count)]


def with_room(num_blocks: int, room: int) -> Ghosts:
    empty = Ghosts.empty(num_blocks)
    assert empty.room == 0
    return Ghosts(empty.table, empty.counts, room, num_blocks)


def test_ghosts_are_those_of_what_was_taken_last() -> None:
    ghosts = Ghosts.empty(100).writable()
    assert len(ghosts.table) == 128
    for key in keys(1000):
        ghosts.remember([key], [False])
    known = [key in ghosts for key in keys(1000)]
    assert sum(known[:100]) <= 2
    assert sum(known[-100:]) > 60
    assert sum(known) <= ghosts.counts[0] == np.count_nonzero(ghosts.table) <= 128
    assert sum(key in ghosts for key in keys(5000, start=1000)) <= 5


@pytest.mark.parametrize("reused", [True, False])
def test_a_ghost_that_comes_back_gives_its_segment_room(reused: bool) -> None:
    before = with_room(64, 32)
    for key in keys(8):
        ghosts = before.writable()
        ghosts.remember([key], [reused])
        ghosts.recall(key)
        assert key not in ghosts
        assert ghosts.counts == (0, 0)
        assert (ghosts.room > 32) == reused
    assert before.room == 32
    assert not before.table.any()


def test_the_rarer_ghosts_weigh_more_and_the_room_stays_within_the_pool() -> None:
    ghosts = with_room(256, 128).writable()
    for key in keys(60):
        ghosts.remember([key], [False])
    ghosts.remember([b"rare key"], [True])
    fresh = ghosts.counts[0]
    assert 40 < fresh <= 60
    ghosts.recall(b"rare key")
    assert ghosts.room == 128 + fresh
    for _ in range(5):
        ghosts.remember([b"rare key"], [True])
        ghosts.recall(b"rare key")
    assert ghosts.room == 256


def test_any_bytes_are_a_key() -> None:
    """Hashes are the user's, and may be short or constant."""
    ghosts = Ghosts.empty(1).writable()
    for key in (b"", b"\x00", b"\xff" * 40):
        ghosts.remember([key], [True])
        assert key in ghosts
        ghosts.recall(key)
        assert key not in ghosts


def make_loop(eviction: str, **changes) -> Loop:
    return Loop(make_config(shares_blocks=True, eviction=eviction_named(eviction), **changes))


def found(loop: Loop, prompt: np.ndarray) -> int:
    """Runs a request to its end; the tokens that were found for it."""
    uid = loop.add(prompt, 1)
    loop.run()
    return loop.cached[uid][0]


@pytest.mark.parametrize(("eviction", "kept"), [("arc", [0, 0, 12, 12]), ("lru", [0, 0, 0, 0])])
def test_a_prefix_that_is_used_again_and_again_comes_to_survive_floods_of_others(
    eviction: str, kept: list[int]
) -> None:
    """Taken once, its coming back shows that what is used again deserves room."""
    loop = make_loop(eviction, num_blocks=16)
    prompt, others = make_prompt(13, seed=1), iter(range(10, 50))
    hits = []
    for _ in kept:
        hits.append(found(loop, prompt))
        assert found(loop, prompt) == 12
        for _ in range(10):
            found(loop, make_prompt(13, next(others)))
    assert hits == kept


@pytest.mark.parametrize(("eviction", "kept"), [("arc", 12), ("lru", 0)])
def test_a_prefix_that_comes_back_after_it_was_taken_is_protected(eviction: str, kept: int) -> None:
    """It was used once more than the cache has seen, since it was taken before the second use."""
    loop = make_loop(eviction, num_blocks=16)
    loop.state = replace(loop.state, pool=replace(loop.state.pool, ghosts=with_room(16, 12)))
    prompt, others = make_prompt(13, seed=1), iter(range(10, 50))
    for _ in range(2):
        assert found(loop, prompt) == 0
        for _ in range(5):
            found(loop, make_prompt(13, next(others)))
    assert found(loop, prompt) == kept


def test_what_was_protected_and_is_not_used_any_more_makes_room() -> None:
    """Another set of prefixes comes into use, as large as the pool; the old one is given up for it."""
    loop = make_loop("arc", num_blocks=24)
    for first in (0, 10):
        for _ in range(6):
            hits = [found(loop, make_prompt(13, seed)) for seed in range(first, first + 6)]
    assert sum(hits) >= 4 * 12


def test_forks_and_victims_that_return_do_not_count_as_use() -> None:
    forks = make_loop("arc")
    uid = forks.add(make_prompt(13), 6)
    for _ in range(4):
        forks.add(forks.requests[uid].prompt, 6, fork_of=uid)
    forks.run()
    assert sum(sum(p.num_forked > 0 for p in plan.admitted) for plan in forks.plans) == 4
    victims = make_loop("arc", num_blocks=6)
    for seed in range(2):
        victims.add(make_prompt(8, seed), 8)
    victims.run()
    assert victims.num_resets
    assert sum(map(sum, victims.cached.values())) > 0
    for loop in (forks, victims):
        assert not (loop.state.pool.cached.marks == PROTECTED).any()


def broken_chains(state: SchedulerState) -> int:
    """Blocks that can never be found, since the one before them is missing."""
    names = state.pool.index.registered().values()
    keys = {name.prefix.key for name in names}
    parents = [name.prefix.parent for name in names]
    return sum(parent.parent is not None and parent.key not in keys for parent in parents)


class Watched(Loop):
    """A loop in which no chain may have a hole.

    Attributes:
      evictions: registered blocks that hold something else now.
    """

    evictions = 0

    def _become(self, state: SchedulerState) -> None:
        before = self.state.pool.index.registered()
        super()._become(state)
        after = state.pool.index.registered()
        self.evictions += sum(after.get(block) is not name for block, name in before.items())
        assert not broken_chains(state), "a block lasted longer than the one before it"


def evictions_of(seeds: Iterable[int], depth: int, eviction: EvictionPolicy) -> int:
    total = 0
    for seed in seeds:
        loop = random_script(seed, depth, shares_blocks=True, eviction=eviction, forks=seed % 2 == 0, make=Watched)
        assert isinstance(loop, Watched)
        total += loop.evictions
    return total


@pytest.mark.parametrize("eviction", LEAF_FIRST, ids=lambda policy: policy.name)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_chain_loses_its_end_before_its_beginning(eviction: EvictionPolicy, depth: int) -> None:
    assert evictions_of(range(6), depth, eviction) > 100


@pytest.mark.slow
@pytest.mark.parametrize("eviction", LEAF_FIRST, ids=lambda policy: policy.name)
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_chain_of_many_has_a_hole(eviction: EvictionPolicy, depth: int) -> None:
    evictions_of(range(1000, 1300), depth, eviction)
