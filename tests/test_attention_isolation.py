"""What paged attention must not read or write: trash, free blocks, stale cells, other rows."""

import numpy as np
import pytest
from paged_rows import MIXED, Row, Step, kernel, make_inputs, make_spec, make_table, mixed_step, pack, real_blocks

from cbjax.attention import KVSpec
from pallas_kernels.paged_attention import reference


def poison(spec: KVSpec, step: Step, kv: np.ndarray) -> np.ndarray:
    """The store with NaN wherever no row of the step may read: both trash blocks, free blocks, stale cells."""
    poisoned = np.full_like(kv, np.nan)
    for row in range(int(step.num_rows)):
        for position in range(int(step.context_len[row])):
            block, offset = divmod(position, spec.block_size)
            cell = (slice(None), slice(None), step.table[step.slot[row], block], offset)
            poisoned[cell] = kv[cell]
    return poisoned


@pytest.mark.parametrize("options", [{}, {"window": 40}], ids=["full", "window"])
@pytest.mark.parametrize("block_size", [16, 256])
def test_nan_in_trash_free_and_stale_cells_changes_no_bit(block_size, options):
    spec = make_spec(block_size)
    step = mixed_step(spec)
    q, k, v, kv = make_inputs(spec, 160)
    num_real = int(step.q_start[-1])
    clean, clean_kv = kernel(q, k, v, kv, *step.args, **options)
    for array in (q, k, v):
        array[num_real:] = np.nan
    dirty, dirty_kv = kernel(q, k, v, poison(spec, step, kv), *step.args, **options)
    assert np.asarray(clean)[:num_real].tobytes() == np.asarray(dirty)[:num_real].tobytes()
    assert np.isfinite(dirty[:num_real]).all()
    written = np.asarray(clean_kv) != kv
    written[:, :, -1] = False
    np.testing.assert_array_equal(np.asarray(dirty_kv)[written], np.asarray(clean_kv)[written])


def test_nan_in_blocks_that_left_the_window_changes_no_bit():
    spec = make_spec(16)
    window = 20
    rows = [Row(slot=0, count=1, context=200), Row(slot=1, count=70, context=270)]
    step = pack(make_table(spec, [200, 270]), rows, max_rows=2)
    q, k, v, kv = make_inputs(spec, 71)
    clean, _ = kernel(q, k, v, kv, *step.args, window=window)
    table = step.table.copy()
    for slot, first_position in ((0, 199), (1, 200)):
        table[slot, : (first_position - window + 1) // spec.block_size] = spec.num_blocks
    kv[:, :, spec.num_blocks] = np.nan
    dirty, _ = kernel(q, k, v, kv, table, *step.args[1:], window=window)
    assert np.asarray(clean).tobytes() == np.asarray(dirty).tobytes()


def test_table_entries_beyond_the_context_are_never_followed():
    spec = make_spec(16)
    step = mixed_step(spec)
    q, k, v, kv = make_inputs(spec, 160)
    clean, clean_kv = kernel(q, k, v, kv, *step.args)
    table = step.table.copy()
    for slot, _, context in MIXED:
        table[slot, -(-context // spec.block_size) :] = -(2**30)
    dirty, dirty_kv = kernel(q, k, v, kv, table, *step.args[1:])
    assert np.asarray(clean).tobytes() == np.asarray(dirty).tobytes()
    assert real_blocks(clean_kv).tobytes() == real_blocks(dirty_kv).tobytes()


def test_one_nan_row_leaves_the_others_alone():
    spec = make_spec(16)
    step = mixed_step(spec)
    q, k, v, kv = make_inputs(spec, 160)
    clean, _ = kernel(q, k, v, kv, *step.args)
    for bad in (1, 2):
        tokens = slice(step.q_start[bad], step.q_start[bad + 1])
        dirty_inputs = [array.copy() for array in (q, k, v)]
        for array in dirty_inputs:
            array[tokens] = np.nan
        dirty, _ = kernel(*dirty_inputs, kv, *step.args)
        others = np.ones(int(step.q_start[-1]), bool)
        others[tokens] = False
        real = slice(0, int(step.q_start[-1]))
        assert np.asarray(clean)[real][others].tobytes() == np.asarray(dirty)[real][others].tobytes()
        assert np.isnan(np.asarray(dirty)[tokens]).all()


def test_a_row_that_has_ended_reads_and_writes_nothing():
    spec = make_spec(16)
    table = make_table(spec, [40, 40, 40])
    rows = [Row(slot=0, count=1, context=40), Row(slot=1, count=1, context=0), Row(slot=2, count=1, context=9)]
    step = pack(table, rows, max_rows=4, single_token_rows=True)
    q, k, v, kv = make_inputs(spec, 4)
    out, new_kv = kernel(q, k, v, kv, *step.args, single_token_rows=True)
    expected, expected_kv = reference(q, k, v, kv, *step.args)
    np.testing.assert_allclose(out, expected, atol=4e-6)
    assert not np.any(np.asarray(out)[1])
    assert real_blocks(new_kv).tobytes() == real_blocks(expected_kv).tobytes()
