"""Paged attention in XLA against the NumPy reference: values, writes, and what must not be read."""

import jax.numpy as jnp
import numpy as np
import pytest
from paged_rows import Row, Step, kernel, make_inputs, make_spec, make_table, mixed_step, pack, real_blocks

from cbjax.attention import KVSpec
from pallas_kernels.paged_attention import reference, write_kv


def check(spec: KVSpec, step: Step, num_tokens: int, **options) -> None:
    """Compares one step with the reference: outputs within rounding, the store to the byte."""
    q, k, v, kv = make_inputs(spec, num_tokens)
    static = {name: options.pop(name) for name in ("single_token_rows",) if name in options}
    out, new_kv = kernel(q, k, v, kv, *step.args, **options, **static)
    expected, expected_kv = reference(q, k, v, kv, *step.args, **options)
    np.testing.assert_allclose(out, expected, atol=4e-6, rtol=1e-5)
    assert np.asarray(new_kv).dtype == spec.dtype
    assert real_blocks(new_kv).tobytes() == real_blocks(expected_kv).tobytes()


@pytest.mark.parametrize("block_size", [4, 16, 24, 256])
def test_mixed_step_equals_the_reference_for_every_block_size(block_size):
    spec = make_spec(block_size)
    check(spec, mixed_step(spec), 160)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"soft_cap": 0.7, "scale": 0.5},
        {"sinks": np.array([0.5, -1.0, 3.0, 0.0], np.float32)},
        {"window": 130, "soft_cap": 2.0, "scale": 0.5, "sinks": np.array([5.0, -1.0, 3.0, 0.0], np.float32)},
    ],
    ids=["window-1", "soft-cap", "sinks", "all"],
)
def test_options_equal_the_reference(options):
    spec = make_spec(16)
    check(spec, mixed_step(spec), 160, **options)


@pytest.mark.parametrize("lengths", [(63, 65), (65, 63), (1, 129), (129, 1)])
def test_b18_two_ragged_rows_equal_the_reference(lengths):
    spec = make_spec(64)
    rows = [Row(slot=slot, count=length, context=length) for slot, length in enumerate(lengths)]
    check(spec, pack(make_table(spec, [129, 129]), rows, max_rows=2), 132)


@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": np.array([1.0, -1.0, 0.0, 2.0], np.float32)}])
def test_decode_program_equals_the_reference(options):
    spec = make_spec(16)
    contexts = [1, 127, 128, 129, 257, 40]
    rows = [Row(slot=slot, count=1, context=context) for slot, context in enumerate(contexts)]
    step = pack(make_table(spec, contexts), rows, max_rows=8, single_token_rows=True)
    check(spec, step, 8, single_token_rows=True, **options)


def test_more_decode_rows_than_one_group_equal_the_reference():
    spec = make_spec(16, blocks_of_128=40)
    contexts = [1 + 7 * index for index in range(37)]
    rows = [Row(slot=slot, count=1, context=context) for slot, context in enumerate(contexts)]
    step = pack(make_table(spec, contexts), rows, max_rows=40, single_token_rows=True)
    check(spec, step, 40, single_token_rows=True)


def test_keys_and_values_are_rounded_to_the_dtype_of_the_store():
    spec = make_spec(16, dtype=jnp.bfloat16)
    check(spec, mixed_step(spec), 160)


@pytest.mark.parametrize("heads", [2, 6])
def test_one_and_three_query_heads_per_kv_head(heads):
    spec = make_spec(16)
    step = mixed_step(spec)
    q, k, v, kv = make_inputs(spec, 160, heads=heads)
    out, _ = kernel(q, k, v, kv, *step.args)
    np.testing.assert_allclose(out, reference(q, k, v, kv, *step.args)[0], atol=4e-6, rtol=1e-5)


def test_reference_writes_only_the_cells_of_its_tokens():
    spec = make_spec(4)
    rows = [Row(slot=0, count=3, context=6), Row(slot=1, count=1, context=1)]
    step = pack(make_table(spec, [6, 1]), rows, max_rows=3)
    _, k, v, kv = make_inputs(spec, 5)
    new = write_kv(k, v, kv, *step.args)
    changed = {(int(block), int(offset)) for _, _, block, offset, _ in np.argwhere(new != kv)}
    table = step.table
    assert changed == {(table[0, 0], 3), (table[0, 1], 0), (table[0, 1], 1), (table[1, 0], 0)}
