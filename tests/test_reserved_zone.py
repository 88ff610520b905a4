"""Invariant 3 on a real model: the two reserved blocks take padding's reads and writes and reach no output.

The store has `num_blocks + 2` blocks. Padding reads block `num_blocks` and writes block `num_blocks + 1`.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.step import initial_slots
from cbjax.testing import tiny_llama

NUM_BLOCKS, BLOCK_SIZE = 64, 4
PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 7, 64, 12, 80, 3]]
GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)


def batching(**settings):
    pool = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_blocks_per_request": 64}
    # Calls repeat their prompts, and every one is to be computed.
    step = {"max_batch_tokens": 64, "max_requests_per_batch": 8, "allow_block_sharing": False}
    return ContinuousBatchingConfig(**(pool | step | {"return_logprobs": True, "compilation_cache": False} | settings))


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    model.generate_batch(PROMPTS, GREEDY, batching())
    yield model
    model.close()


def generate(lm, prompts, config=GREEDY, **settings):
    """Tokens and logprobs of each prompt; tuples, so that equal means equal in every bit."""
    outputs = lm.generate_batch(prompts, config, batching(**settings)).values()
    assert not [output.error for output in outputs if output.error]
    return [(output.generated_tokens, output.logprobs) for output in outputs]


def fill(lm, blocks, value):
    """Overwrites blocks of the idle store."""
    cache = lm.session.device.cache
    cache.kv = [array.at[:, :, blocks].set(value) for array in cache.kv]


def test_the_zone_lies_behind_the_blocks_that_can_be_handed_out(lm):
    cache = lm.session.device.cache
    assert (cache.num_blocks, cache.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    for spec, array in zip(cache.specs, cache.kv, strict=True):
        assert array.shape == spec.shape
        assert array.shape[2] == NUM_BLOCKS + 2
        assert (spec.read_trash, spec.sentinel, spec.write_trash) == (256, 257, 260)
    pool = lm.session.engine.state.pool
    assert sorted(pool.free_ids().tolist()) == list(range(NUM_BLOCKS))


def test_a_fresh_block_table_names_the_read_trash():
    table = initial_slots(num_slots=8, num_groups=1, max_blocks=5, num_blocks=NUM_BLOCKS).table
    np.testing.assert_array_equal(table, np.full((1, 8 + 1, 5), NUM_BLOCKS))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_invariant_3_what_is_in_the_reserved_blocks_changes_no_bit(lm, value):
    fill(lm, slice(None), 0.0)
    expected = [generate(lm, PROMPTS[:count]) for count in (1, 3)]
    fill(lm, slice(NUM_BLOCKS, None), value)
    for count, outputs in zip((1, 3), expected, strict=True):
        assert generate(lm, PROMPTS[:count]) == outputs


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("budget", [64, 8])
def test_invariant_3_what_is_in_free_blocks_changes_no_bit(lm, value, budget):
    generate(lm, PROMPTS, max_batch_tokens=budget)
    fill(lm, slice(None), 0.0)
    expected = generate(lm, PROMPTS, max_batch_tokens=budget)
    fill(lm, slice(None), value)
    assert generate(lm, PROMPTS, max_batch_tokens=budget) == expected


@pytest.mark.parametrize("count", [1, 3])
def test_b17_a_padded_batch_changes_its_own_cells_and_the_write_trash_only(lm, count, monkeypatch):
    generate(lm, PROMPTS)
    device, tables = lm.session.device, {}
    update_table = device.update_table

    def recorded(delta):
        for slot, column, block in zip(delta.slot.tolist(), delta.column.tolist(), delta.block.tolist(), strict=True):
            tables[slot, column] = block
        update_table(delta)

    monkeypatch.setattr(device, "update_table", recorded)
    # A bit pattern that no computation gives.
    fill(lm, slice(None), -7.25e33)
    before = [np.asarray(array).copy() for array in device.cache.kv]
    generate(lm, PROMPTS[:count])
    # The last token is never fed back. Requests take slots in the order of the call.
    own = {
        (tables[slot, position // BLOCK_SIZE], position % BLOCK_SIZE)
        for slot, prompt in enumerate(PROMPTS[:count])
        for position in range(len(prompt) + 6 - 1)
    }
    assert len(own) == sum(len(prompt) + 5 for prompt in PROMPTS[:count])
    for old, new in zip(before, device.cache.kv, strict=True):
        new = np.asarray(new)
        changed = (old != new).all(axis=(0, 1, 4))
        assert np.array_equal(changed, (old != new).any(axis=(0, 1, 4))), "cells are written as a whole"
        cells = {(int(block), int(offset)) for block, offset in np.argwhere(changed)}
        assert cells == own | {(NUM_BLOCKS + 1, 0)}


@pytest.mark.parametrize("lengths", [(63, 65), (65, 63), (1, 129), (129, 1), (64, 128)])
def test_b18_two_rows_around_a_blocks_end_equal_their_solo_runs(lm, lengths):
    settings = {"block_size": 64, "num_blocks": 8, "max_blocks_per_request": 8}
    prompts = [np.random.default_rng(length).integers(258, size=length) for length in lengths]
    together = generate(lm, prompts, **settings)
    for prompt, (tokens, logprobs) in zip(prompts, together, strict=True):
        ((alone, alone_logprobs),) = generate(lm, [prompt], **settings)
        assert tokens == alone == dense_greedy(lm, prompt)
        np.testing.assert_allclose(logprobs, alone_logprobs, rtol=0, atol=1e-5)


def dense_greedy(lm, prompt):
    """The oracle: a full causal pass for each token."""
    tokens = np.zeros(136, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + 6):
        tokens[end] = int(jnp.argmax(lm(tokens)[end - 1]))
    return tokens[len(prompt) : len(prompt) + 6].tolist()
