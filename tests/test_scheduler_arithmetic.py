"""The arithmetic of blocks, margins and padding, on the functions that the scheduler and the cache use."""

import numpy as np
import pytest
from machines import make_config, make_request

from cbjax.attention import KVSpec
from cbjax.config import ContinuousBatchingConfig
from cbjax.resolve import FALLBACK_BLOCKS_PER_REQUEST, FALLBACK_REQUEST_TOKENS, blocks_from_hints
from cbjax.scheduler import (
    MIN_BLOCK_SIZE,
    NUM_RESERVED_BLOCKS,
    BlockPool,
    add,
    blocks_for,
    initial_state,
    internal_waste,
    may_admit,
    padding_waste,
    schedule,
)


def joined(batch: int, prompt: int) -> int:
    """Waste when a prompt joins `batch - 1` decoding requests."""
    return padding_waste([prompt] + [1] * (batch - 1))


def test_padding_waste_of_a_hundred_tokens_beside_seven_decodes() -> None:
    assert padding_waste([100] + [1] * 7) == 693
    assert joined(1, 100) == 0
    assert joined(8, 1) == 0
    assert all(joined(b, n) == (n - 1) * (b - 1) for b in range(1, 40) for n in range(1, 40))


def test_padding_waste_is_linear_in_rows_and_in_tokens() -> None:
    in_rows = np.array([joined(b, 100) for b in range(1, 22)])
    in_tokens = np.array([joined(8, n) for n in range(1, 22)])
    assert not np.diff(in_rows, 2).any()
    assert not np.diff(in_tokens, 2).any()
    assert np.diff(in_rows).all()
    assert np.diff(in_tokens).all()
    assert joined(9, 101) - joined(9, 100) - joined(8, 101) + joined(8, 100) == 1


@pytest.mark.parametrize("lengths", [[100, 0, 1], [0], [], [3, -1]])
def test_padding_waste_refuses_a_row_without_tokens(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        padding_waste(lengths)


def test_a_ragged_batch_has_no_padding() -> None:
    state = initial_state(make_config(max_batch_tokens=200))
    for uid, length in enumerate([100, 1, 1, 1]):
        state = add(state, make_request(uid, length, 1))
    plan, _ = schedule(state)
    assert plan.batch.num_tokens == 103


@pytest.mark.parametrize("block_size", [4, 5, 16, 256])
def test_blocks_hold_their_tokens_and_waste_less_than_one_block(block_size: int) -> None:
    assert blocks_for(0, block_size) == 0
    assert (blocks_for(block_size, block_size), internal_waste(block_size, block_size)) == (1, 0)
    assert (blocks_for(block_size + 1, block_size), internal_waste(block_size + 1, block_size)) == (2, block_size - 1)
    wastes = [internal_waste(n, block_size) for n in range(1, 2 * block_size + 1)]
    assert min(wastes) == 0
    assert max(wastes) == block_size - 1
    for num_tokens in (1, 255, 256, 257, 512, 1000, 4096, 8191):
        held = blocks_for(num_tokens, block_size) * block_size
        assert held - block_size < num_tokens <= held


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "reserved_percent", "table_entries", "worst_tail"),
    [
        (4, 262142, "0.0008", 2048, 3),
        (16, 65534, "0.0031", 512, 15),
        (64, 16382, "0.0122", 128, 63),
        (256, 4094, "0.0488", 32, 255),
        (1024, 1022, "0.1953", 8, 1023),
    ],
)
def test_block_size_table_for_four_gibibytes_a_layer(
    block_size: int, num_blocks: int, reserved_percent: str, table_entries: int, worst_tail: int
) -> None:
    budget = 4 * 2**30
    block = KVSpec(num_kv_heads=8, head_dim=128, block_size=block_size, num_blocks=1, dtype="float16").block_bytes
    assert budget // block - NUM_RESERVED_BLOCKS == num_blocks
    spec = KVSpec(num_kv_heads=8, head_dim=128, block_size=block_size, num_blocks=num_blocks, dtype="float16")
    assert spec.layer_bytes == budget
    assert f"{100 * NUM_RESERVED_BLOCKS / spec.shape[2]:.4f}" == reserved_percent
    assert blocks_for(8192, block_size) == table_entries
    assert max(internal_waste(n, block_size) for n in range(1, 2 * block_size + 1)) == worst_tail


def test_reserved_zone_lies_behind_the_pool() -> None:
    spec = KVSpec(num_kv_heads=8, head_dim=128, block_size=256, num_blocks=64)
    assert spec.shape[2] == 64 + NUM_RESERVED_BLOCKS
    assert spec.shape[2] * spec.block_size == 16896
    assert (spec.read_trash, spec.sentinel, spec.write_trash) == (16384, 16385, 16640)
    taken = BlockPool.full(64).take(64)
    assert taken is not None
    assert (int(taken[1].max()) + 1) * spec.block_size == spec.read_trash


def test_the_default_block_table_addresses_8192_tokens() -> None:
    default = ContinuousBatchingConfig().block_size
    assert (FALLBACK_BLOCKS_PER_REQUEST, default) == (32, 256)
    assert FALLBACK_BLOCKS_PER_REQUEST * default == FALLBACK_REQUEST_TOKENS == 8192
    assert blocks_for(8192, default) == 32
    assert blocks_for(8193, default) > 32


def test_hints_give_an_even_number_of_columns_with_one_to_spare() -> None:
    assert blocks_from_hints(30_000, 2_000, 256) == 126
    assert blocks_from_hints(4_000, 500, 256) == 20
    for tokens in range(1, 3000, 7):
        columns = blocks_from_hints(tokens, 5, 16)
        assert columns % 2 == 0
        assert blocks_for(tokens + 5, 16) + 1 <= columns <= blocks_for(tokens + 5, 16) + 2


def test_admission_at_the_reserve_exactly() -> None:
    assert may_admit(free=10, need=1, num_blocks=64, safety_margin=0.15)
    assert not may_admit(free=9, need=1, num_blocks=64, safety_margin=0.15)
    assert may_admit(free=16, need=1, num_blocks=64, safety_margin=0.25)
    assert not may_admit(free=15, need=1, num_blocks=64, safety_margin=0.25)
    assert not may_admit(free=10, need=11, num_blocks=64, safety_margin=0.0)
    assert may_admit(free=0, need=0, num_blocks=64, safety_margin=0.0)
    # At every whole percent of a hundred blocks, whatever the product's last bit.
    assert all(may_admit(free=n, need=1, num_blocks=100, safety_margin=n / 100) for n in range(1, 101))
    assert not any(may_admit(free=n - 1, need=1, num_blocks=100, safety_margin=n / 100) for n in range(1, 101))


@pytest.mark.parametrize("margin", [-0.01, 1.01, float("nan")])
def test_a_margin_outside_zero_to_one_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="safety_margin must be in"):
        make_config(safety_margin=margin)
    with pytest.raises(ValueError, match="safety_margin must be in"):
        ContinuousBatchingConfig(safety_margin=margin)


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_ends_of_the_margin_are_accepted(margin: float) -> None:
    assert make_config(safety_margin=margin).safety_margin == margin
    assert ContinuousBatchingConfig(safety_margin=margin).safety_margin == margin


@pytest.mark.parametrize("block_size", [0, 1, 2, 3])
def test_a_block_below_four_tokens_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must be at least 4 tokens; got {block_size}"):
        make_config(block_size=block_size)
    with pytest.raises(ValueError, match=f"block_size must be at least 4 tokens; got {block_size}"):
        ContinuousBatchingConfig(block_size=block_size)


def test_a_block_of_four_tokens_is_accepted() -> None:
    assert MIN_BLOCK_SIZE == 4
    assert make_config(block_size=4).block_size == 4
    assert ContinuousBatchingConfig(block_size=4).block_size == 4


@pytest.mark.parametrize(
    "field", ["num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"]
)
def test_a_size_below_one_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1; got 0"):
        make_config(**{field: 0})
