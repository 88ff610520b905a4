"""Layers dealt into groups of equal size, and the arithmetic of the blocks that groups with windows hold."""

from dataclasses import replace

import pytest
from machines import DEPTHS, POLICIES, Loop, make_config, make_request

from cbjax import ContinuousBatchingConfig, WorkloadHints
from cbjax.attention import LayerSpec, layer_groups, store_spec
from cbjax.machine import MachineFacts
from cbjax.resolve import ModelFacts, resolve
from cbjax.scheduler import add, held_together, initial_state, most_columns, most_held

CPU = MachineFacts(platform="cpu", device="cpu", free_bytes=1 << 34, source="the test")


def layers(*windows: int | None, kv_heads: int = 2, head_dim: int = 8) -> list[LayerSpec]:
    return [LayerSpec(num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim, window=window) for window in windows]


# (windows of the layers, windows of the groups, arrays, empty places)
DEALT = [
    ([None] * 4, (None,), 4, 0),
    ([8] * 4, (8,), 4, 0),
    ([8, None] * 3, (None, 8), 3, 0),
    ([None, 8, 8], (None, 8, 8), 1, 0),
    ([None, 8, 16] * 2, (None, 8, 16), 2, 0),
    ([None] * 4 + [8] * 5, (None, 8), 5, 1),
    (([8] * 5 + [None]) * 5 + [8] * 4, (None, *[8] * 5), 6, 2),
    ([None] * 20 + [8] * 30, (None, None, 8, 8, 8), 10, 0),
]


@pytest.mark.parametrize(("windows", "groups", "arrays", "padded"), DEALT)
def test_layers_are_dealt_into_groups_of_equal_size(windows, groups, arrays, padded) -> None:
    dealt = layer_groups(layers(*windows))
    assert dealt.windows == groups
    assert dealt.shapes == ((2, 8),) * arrays
    assert dealt.num_padded == padded == len(groups) * arrays - len(windows)
    assert len(set(dealt.places)) == len(windows), "two layers of one group share an array"
    for window, (group, array) in zip(windows, dealt.places, strict=True):
        assert dealt.windows[group] == window
        assert 0 <= array < arrays
    specs = store_spec(dealt, num_blocks=6, block_size=4, dtype="float32").arrays
    assert [spec.num_blocks for spec in specs] == [6] * arrays


def test_a_window_over_all_positions_is_none() -> None:
    dealt = layer_groups(layers(None, 64, 63, 100), max_positions=64)
    assert dealt.windows[0] is None
    assert [dealt.windows[group] for group, _ in dealt.places] == [None, None, 63, None]


def test_layers_of_other_shapes_lie_in_other_arrays() -> None:
    mixed = layers(None, 8, 8) + layers(None, 8, kv_heads=1, head_dim=16)
    dealt = layer_groups(mixed)
    for layer, (group, array) in zip(mixed, dealt.places, strict=True):
        assert dealt.windows[group] == layer.window
        assert dealt.shapes[array] == (layer.num_kv_heads, layer.head_dim)
    assert len(set(dealt.places)) == len(mixed)
    one = layer_groups(layers(None, None) + layers(None, kv_heads=1))
    assert (one.windows, one.shapes, one.num_padded) == ((None,), ((2, 8), (2, 8), (1, 8)), 0)


def simulated(cells: int, chunk: int, window: int | None, block_size: int) -> int:
    """Most blocks between the first cell a step reads and the last it writes, over every way to cut into chunks."""
    most = 0
    for start in range(cells):
        first = 0 if window is None else max(0, start - window + 1)
        end = min(cells, start + chunk)
        most = max(most, (end - 1) // block_size - first // block_size + 1)
    return most


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 64])
def test_the_most_that_is_held_is_a_bound_and_exact_token_by_token(window: int | None, chunk: int) -> None:
    for block_size in (4, 5):
        for cells in range(1, 60):
            bound, held = most_held(cells, chunk, window, block_size), simulated(cells, chunk, window, block_size)
            assert held <= bound
            assert bound == held or chunk > 1
            if window is not None:
                assert bound <= -(-(window + chunk) // block_size) + 1


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,), (3, 9), (None, 3, 9), (None, None, 5), (2, 2, 30)])
def test_the_columns_a_request_can_fill_are_the_most_that_fit(windows: tuple[int | None, ...]) -> None:
    for num_blocks in range(1, 40):
        columns = most_columns(windows, num_blocks=num_blocks, block_size=4, limit=25)
        held = [sum(most_held(4 * n, 1, window, 4) for window in windows) for n in range(26)]
        assert columns == max(n for n in range(26) if held[n] <= num_blocks)


def test_invariant_5_what_can_never_fit_is_refused_and_the_largest_that_fits_ends() -> None:
    """Two groups, one with a window: it holds three blocks at most, so the full one can have 7 of 10."""
    config = make_config(num_blocks=10, windows=(None, 8), max_batch_tokens=16)
    assert config.max_request_tokens == 28
    with pytest.raises(ValueError, match=r"20 prompt tokens and 10 new ones need 29 cells.*windows.*can hold 28"):
        add(initial_state(config), make_request(0, 20, 10))
    assert 0 < config.chunk_limit(28) < 16, "its prompt has to come in smaller chunks than the budget"
    for prompt in (1, 9, 20, 28):
        loop = Loop(config)
        loop.add(prompt, 29 - prompt)
        loop.run()


@pytest.mark.parametrize("windows", [(8,), (None, 8), (6, 3)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_invariant_5_requests_that_each_need_the_whole_pool_all_end(windows, policy: str, depth: int) -> None:
    num_blocks = {(8,): 3, (None, 8): 10, (6, 3): 5}[windows]
    sizes = {"max_batch_tokens": 9, "max_blocks_per_request": 7}
    config = make_config(policy=policy, num_blocks=num_blocks, windows=windows, **sizes)
    assert config.max_request_tokens == 28
    loop = Loop(config, depth=depth)
    for uid in range(6):
        loop.add(1 + 4 * uid, 28 - 4 * uid)
    loop.run()


def test_a_model_of_windows_alone_generates_far_beyond_its_pool() -> None:
    loop = Loop(make_config(num_blocks=4, windows=(8,), max_blocks_per_request=128))
    loop.add(40, 400)
    held = set()
    while not loop.state.is_idle:
        loop.step()
        held.add(4 - loop.state.pool.num_free)
    loop.verify()
    assert max(held) == 4
    assert loop.num_resets == 0


@pytest.mark.parametrize("windows", [(8,), (None, 8), (3, 9)])
def test_nobody_lacks_a_block_in_a_pool_for_all(windows: tuple[int | None, ...]) -> None:
    for budget in (3, 16, 64):
        sizes = [(5 + 6 * i, 1) for i in range(6)]
        num_blocks = held_together(sizes, windows=windows, block_size=4, max_batch_tokens=budget)
        loop = Loop(make_config(num_blocks=num_blocks, windows=windows, max_batch_tokens=budget))
        for cells, _ in sizes:
            loop.add(cells - 4, 5)
        loop.run()
        assert not any(plan.num_starved for plan in loop.plans)


@pytest.mark.parametrize("windows", [(), (None, 0), (-1,)])
def test_a_window_below_one_token_is_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="windows has one entry per layer group, at least 1 token or None"):
        make_config(windows=windows)


def test_the_pool_is_sized_by_what_windows_keep() -> None:
    model = ModelFacts(block_bytes_per_token=1024, token_bytes=4096, row_bytes=4096, max_positions=1 << 16)
    hints = WorkloadHints(max_prompt_length=4000, max_generated_length=96, num_requests=4)
    config = ContinuousBatchingConfig(block_size=16, max_batch_tokens=64, max_requests_per_batch=4)

    def resolved(*windows: int | None):
        return resolve(config, hints, CPU, replace(model, windows=windows))

    full, mixed, windowed = resolved(None), resolved(None, 128), resolved(128)
    assert full.scheduler.num_blocks == 4 * 256
    # 127 tokens before a new one lie in nine blocks at most; a step's 64 tokens in four more.
    assert windowed.scheduler.num_blocks == 4 * 9 + 4
    assert mixed.scheduler.num_blocks == full.scheduler.num_blocks + windowed.scheduler.num_blocks
    for each in (full, mixed, windowed):
        assert each.scheduler.safety_margin == 0.0
        assert each.scheduler.max_blocks_per_request == 258 or each is full
        assert each.scheduler.max_request_tokens >= 4096
    assert "2 groups share them" in mixed.report()
