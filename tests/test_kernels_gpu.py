"""The GPU kernels apart from their results: the store's layout, how a step is dealt out, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import Case, make_batch

from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.gpu.plan import MIN_TILES, TILE, make_plan

LLAMA = {"num_kv_heads": 8, "head_dim": 128, "block_size": 64, "num_blocks": 10}


def test_a_layout_tells_its_shape_and_bytes():
    layout = gpu.GpuLayout(**LLAMA)
    assert layout.shape == (12, 16, 64, 128)
    assert layout.token_bytes == 4096
    assert layout.layer_bytes == 12 * 64 * 4096
    assert layout.padding == 0
    assert gpu.GpuLayout(**(LLAMA | {"head_dim": 80})).padding == 1 - 80 / 128
    assert gpu.GpuLayout(**(LLAMA | {"head_dim": 64, "dtype": "float8_e4m3fn"})).token_bytes == 1024


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1; got 0"),
        ({"block_size": 48}, ValueError, r"block_size must be one of \(16, 32, 64, 128, 256\) .* got 48"),
        ({"dtype": "float32"}, NotImplementedError, "store bfloat16, float16, float8_e4m3fn; got float32"),
        ({"dtype": "int8"}, NotImplementedError, "got int8"),
        ({"head_dim": 257}, NotImplementedError, "heads of at most 256; got head_dim 257"),
        ({"num_kv_heads": 129}, NotImplementedError, "at most 128 kv heads; got 129"),
    ],
)
def test_a_layout_that_the_kernels_do_not_have_is_refused(changes, error, text):
    with pytest.raises(error, match=text):
        gpu.GpuLayout(**(LLAMA | changes))


def test_a_store_goes_into_its_layout_and_back():
    layout = gpu.GpuLayout(**(LLAMA | {"head_dim": 80, "block_size": 16}))
    kv = jnp.arange(2 * 8 * 12 * 16 * 80, dtype=jnp.float32).reshape(2, 8, 12, 16, 80).astype(layout.dtype)
    stored = gpu.to_layout(kv, layout)
    assert stored.shape == layout.shape
    np.testing.assert_array_equal(stored[3, 8 + 2, 5, :80], kv[1, 2, 3, 5])
    np.testing.assert_array_equal(gpu.from_layout(stored, layout), kv)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": ((4, 6, 128), "float32")}, NotImplementedError, "compute with bfloat16 and float16; got q of float32"),
        ({"q": ((4, 130, 128), "bfloat16")}, NotImplementedError, "at most 64 query heads to a kv head; got 130 and 2"),
        ({"kv": ((5, 4, 16, 128), "float16")}, NotImplementedError, "q's dtype or of 8 bits; got float16 and bfloat16"),
        ({"kv": ((5, 4, 16, 64), "bfloat16")}, ValueError, r"kv must be \[5, 4, 16, 128\] for 2 kv heads of 128"),
    ],
)
def test_arguments_that_the_kernels_have_no_form_for_are_refused(changes, error, text):
    shapes = {
        "q": ((4, 6, 128), "bfloat16"),
        "k": ((4, 2, 128), "bfloat16"),
        "v": ((4, 2, 128), "bfloat16"),
        "kv": ((5, 4, 16, 128), "bfloat16"),
        "table": ((3, 4), "int32"),
        "slot": ((2,), "int32"),
        "q_start": ((3,), "int32"),
        "context_len": ((2,), "int32"),
        "num_rows": ((), "int32"),
    } | changes
    arrays = {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items() if isinstance(value, tuple)}
    rest = {name: value for name, value in shapes.items() if name not in arrays}
    with pytest.raises(error, match=text):
        jax.eval_shape(partial(gpu.paged_attention, **rest), **arrays)


@pytest.mark.parametrize("sizes", [{"multiprocessors": 0}, {"span": 100}, {"items_per_program": 0}])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        gpu.GpuSizes(**sizes)


ROWS, COLUMNS, BLOCK_SIZE, TOKENS = 12, 600, 16, 1200
_make_plan = jax.jit(
    partial(make_plan, num_tokens=TOKENS, block_size=BLOCK_SIZE, varlen_tile=32),
    static_argnames=("target_items", "windows", "span"),
)


def _plan(contexts, *, counts=None, window=None, target=10, span=None):
    """The plan of rows with these contexts, each in a slot of its own, padded so that few programs are compiled."""
    padding = [0] * (ROWS - len(contexts))
    counts = counts or [min(context, 1) for context in contexts]
    plan = _make_plan(
        np.arange((ROWS + 1) * COLUMNS, dtype=np.int32).reshape(ROWS + 1, COLUMNS),
        np.arange(ROWS, dtype=np.int32),
        np.array([0, *np.cumsum(counts + padding)], np.int32),
        np.array(contexts + padding, np.int32),
        np.int32(len(contexts)),
        target_items=target,
        windows=(window,),
        span=span,
    )
    return jax.tree.map(np.asarray, plan)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.one_of(st.just(0), st.integers(1, 90), st.integers(1, 9000)), min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 64, 700]),
    target=st.sampled_from([1, 7, 40]),
    span=st.sampled_from([None, None, 64, 512]),
)
def test_decode_items_cover_what_each_row_sees_once(contexts, window, target, span):
    items = _plan(contexts, window=window, target=target, span=span).decodes[0]
    count = int(items.count[0])
    assert count <= items.row.shape[0]
    if span is None:
        assert count <= target + len(contexts)
    edges = np.asarray(items.row_items)
    assert edges[-1] == count
    for row, context in enumerate(contexts):
        low = 0 if window is None else max(context - window, 0)
        at = low // TILE * TILE
        for item in range(edges[row], edges[row + 1]):
            assert (items.row[item], items.slot[item], items.low[item]) == (row, row, low)
            assert items.first[item] == at
            assert low < items.stop[item]
            at = int(items.stop[item])
            if at < context:
                tiles = (at - int(items.first[item])) // TILE
                assert at % TILE == 0
                assert tiles == span // TILE if span else tiles >= MIN_TILES // 2
        assert at == context or edges[row] == edges[row + 1] == edges[row] + context


def test_a_span_that_is_fixed_cuts_a_row_as_if_it_were_alone():
    alone, beside = (_plan(contexts, span=256).decodes[0] for contexts in ([3000], [3000, 8000, 17]))
    number = int(alone.count[0])
    assert number == -(-3000 // 256)
    for name in ("first", "low", "stop"):
        np.testing.assert_array_equal(getattr(alone, name)[:number], getattr(beside, name)[:number])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 100), min_size=1, max_size=10))
def test_each_token_is_computed_by_one_kernel_in_one_place(counts):
    contexts = [count + 7 * (count > 0) for count in counts]
    plan = _plan(contexts, counts=counts)
    items = plan.varlen
    assert int(items.count[0]) <= items.slot.shape[0]
    token, seen = 0, set()
    for row, count in enumerate(counts):
        for index in range(count):
            position = contexts[row] - count + index
            assert plan.token_block[token] == plan.table[row, position // 16]
            assert plan.token_offset[token] == position % 16
            if count == 1:
                assert (plan.token_row[token], items.token_item[token]) == (row, -1)
                assert plan.decode_token[row] == token
            else:
                item, place = int(items.token_item[token]), int(items.token_place[token])
                assert plan.token_row[token] == -1
                assert item < items.count[0]
                assert place < items.tokens[item] <= items.tile
                assert items.first[item] + place == token
                assert items.position[item] + place == position
                assert items.slot[item] == row
                assert (item, place) not in seen
                seen.add((item, place))
            token += 1
    np.testing.assert_array_equal(plan.token_block[token:], -1)


def test_invariant_4_with_a_fixed_span_a_rows_bits_do_not_depend_on_the_others():
    rows = ((300, 1), (700, 1), (40, 1))
    batch = make_batch(Case(rows=rows, kv_heads=1, dtype="bfloat16", padding_rows=0))
    layout = gpu.GpuLayout(num_kv_heads=1, head_dim=128, block_size=16, num_blocks=batch.kv.shape[2] - 2)
    call = jax.jit(
        partial(
            gpu.paged_attention,
            single_token_rows=True,
            sizes=gpu.GpuSizes(multiprocessors=2, span=128),
            interpret=plgpu.InterpretGPUParams(),
        )
    )
    store = gpu.to_layout(jnp.asarray(batch.kv), layout)
    together, _ = call(batch.q, batch.k, batch.v, store, *batch.step)
    alone, _ = call(
        batch.q[:1], batch.k[:1], batch.v[:1], store, batch.table, batch.slot[:1], batch.q_start[:2],
        batch.context_len[:1], np.int32(1),
    )  # fmt: skip
    assert np.asarray(together)[:1].tobytes() == np.asarray(alone).tobytes()
