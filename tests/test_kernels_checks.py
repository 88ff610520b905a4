"""What both kinds of kernels refuse, with the rule and what was given: never a wrong answer or another error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from cbjax.attention import prepare_batch
from pallas_kernels.paged_attention import KVLayout, Sizes, gpu, paged_attention
from pallas_kernels.paged_attention.checks import check_window
from pallas_kernels.paged_attention.gpu.softmax import LOG2E, base2_scores

SIZES = {"num_kv_heads": 2, "head_dim": 128, "block_size": 16, "num_blocks": 3, "dtype": jnp.bfloat16}
FUNCTIONS = {"tpu": (paged_attention, KVLayout(**SIZES)), "gpu": (gpu.paged_attention, gpu.GpuLayout(**SIZES))}
ROWS = {"table": (3, 4), "slot": (2,), "q_start": (3,), "context_len": (2,), "num_rows": ()}


def call(kind, changes):
    """Traces the function of these arguments; a pair of shape and dtype stands for an array."""
    function, layout = FUNCTIONS[kind]
    given = {name: ((4, heads, 128), "bfloat16") for name, heads in (("q", 6), ("k", 2), ("v", 2))}
    given |= {"kv": (layout.shape, "bfloat16")} | {name: (shape, "int32") for name, shape in ROWS.items()} | changes
    arrays = {name: jax.ShapeDtypeStruct(*value) for name, value in given.items() if isinstance(value, tuple)}
    rest = {name: value for name, value in given.items() if name not in arrays}
    return jax.eval_shape(partial(function, **rest), **arrays)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_goes_together_is_taken(kind):
    out, _ = call(kind, {"window": np.int64(5), "soft_cap": np.float32(2), "scale": 1, "sinks": ((6,), "float32")})
    assert out.shape == (4, 6, 128)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((4, 7, 128), "bfloat16")}, "kv heads must divide query heads; got 2 and 7"),
        ({"q": ((4, 128), "bfloat16")}, r"q must be an array \[tokens, heads, head_dim\]; got bfloat16\[4, 128\]"),
        ({"q": ((4, 0, 128), "bfloat16")}, "q must be an array"),
        ({"q": ((5, 6, 128), "bfloat16")}, "as many tokens"),
        ({"k": ((4, 0, 128), "bfloat16"), "v": ((4, 0, 128), "bfloat16")}, "k must be an array"),
        ({"k": ((4, 2, 128), "int32"), "v": ((4, 2, 128), "int32")}, "k must be of floating-point numbers"),
        ({"k": ((4, 2, 128), "complex64"), "v": ((4, 2, 128), "complex64")}, "k must be of floating-point numbers"),
        ({"v": ((4, 2, 64), "bfloat16")}, "k and v must have one shape"),
        ({"q": [[1.0]]}, "q must be an array"),
        ({"kv": ((2, 4, 16, 128), "bfloat16")}, "kv must be an array"),
        ({"kv": ((5, 4, 16, 64), "bfloat16")}, r"kv must be \[5, 4, 16, 128\] for 2 kv heads of 128"),
        ({"slot": ((3,), "int32")}, r"q_start must be an array i32\[4\]; got int32\[3\]"),
        ({"slot": ((3, 1), "int32")}, r"slot must be an array i32\[rows\]; got int32\[3, 1\]"),
        ({"slot": ((), "int32")}, r"slot must be an array i32\[rows\]"),
        ({"slot": [0, 1]}, r"slot must be an array i32\[rows\]; got \[0, 1\]"),
        ({"slot": ((0,), "int32"), "q_start": ((1,), "int32"), "context_len": ((0,), "int32")}, "slot must not be"),
        ({"table": ((12,), "int32")}, r"table must be an array i32\[slots \+ 1, max_blocks\]"),
        ({"table": ((3, 0), "int32")}, "table must not be empty"),
        ({"table": ((3, 4), "uint32")}, "table must be an array i32"),
        ({"context_len": ((2,), "float32")}, "context_len must be an array i32"),
        ({"num_rows": 2}, r"num_rows must be an array i32\[\]; got 2"),
        ({name: ((0, n, 128), "bfloat16") for name, n in (("q", 6), ("k", 2), ("v", 2))}, "at least one token"),
        ({"single_token_rows": True}, "as many rows as tokens"),
        ({"window": 0}, "window must be an int of at least 1, or None; got 0"),
        ({"window": 1.5}, "window must be an int"),
        ({"window": True}, "window must be an int"),
        ({"window": "8"}, "window must be an int"),
        ({"soft_cap": 0.0}, "soft_cap must be a positive, finite number or None; got 0.0"),
        ({"soft_cap": float("nan")}, "soft_cap must be a positive"),
        ({"soft_cap": float("inf")}, "soft_cap must be a positive"),
        ({"scale": float("nan")}, "scale must be a finite number or None; got nan"),
        ({"scale": 1j}, "scale must be a finite number"),
        ({"sinks": ((5,), "float32")}, r"sinks must be an array \[heads\], \[6\]"),
        ({"sinks": [0.0] * 6}, "sinks must be an array"),
        ({"k_scales": ((2,), "float32")}, "come together"),
        ({"k_scales": ((2,), "float32"), "v_scales": ((2,), "float32")}, "stores of 8 bits; got a store of bfloat16"),
        ({"k_scales": ((3,), "float32"), "v_scales": ((2,), "float32")}, r"k_scales must be .* \[2\]"),
        ({"k_scales": 1.0, "v_scales": 1.0}, "k_scales must be an array"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        call(kind, changes)


def test_a_window_that_reaches_over_everything_is_none():
    assert [check_window(window) for window in (None, 1, 2**31 - 2, 2**31 - 1, 2**40)] == [
        None,
        1,
        2**31 - 2,
        None,
        None,
    ]
    out, _ = call("tpu", {"window": 2**33})
    assert out.shape == (4, 6, 128)


def test_an_integer_store_needs_factors():
    kv = (KVLayout(**(SIZES | {"dtype": jnp.int8})).shape, "int8")
    with pytest.raises(ValueError, match="a store of int8 needs k_scales and v_scales"):
        call("tpu", {"kv": kv})


@pytest.mark.parametrize("sizes", [{"cores": 3}, {"cores": 0}, {"cores": -1}, {"vmem_limit_bytes": 0}])
def test_sizes_that_no_tpu_has_are_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be"):
        Sizes(**sizes)


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r'backend must be "tpu", "gpu" or None; got \'cuda\''):
        call("tpu", {"backend": "cuda"})


@pytest.mark.parametrize("interpret", [True, pltpu.InterpretParams()])
def test_the_gpu_kernels_are_interpreted_by_their_own_interpreter_only(interpret):
    with pytest.raises(ValueError, match="interpret must be None or InterpretGPUParams"):
        call("gpu", {"interpret": interpret})


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_sizes_of_the_other_kernels_are_refused(kind):
    with pytest.raises(ValueError, match="sizes must be"):
        call(kind, {"sizes": gpu.GpuSizes() if kind == "tpu" else Sizes(chunk=128)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 0}, "group from 1 to 64; got 2 and 0"),
        ({"group": 65}, "group from 1 to 64"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"block_size": 48}, r"block_size must be one of \(16, 32, 64, 128, 256\); got 48"),
    ],
)
def test_a_plan_for_gpus_that_cannot_be_is_refused(changes, message):
    rows = {name: jnp.zeros(shape, jnp.int32) for name, shape in ROWS.items()}
    with pytest.raises(ValueError, match=message):
        gpu.plan_step(**rows, **{"num_tokens": 4, "block_size": 16, "kv_heads": 2, "group": 3} | changes)


def test_a_plan_of_other_blocks_than_the_store_has_is_refused():
    rows = {name: jnp.zeros(shape, jnp.int32) for name, shape in ROWS.items()}
    plan = gpu.plan_step(**rows, num_tokens=4, block_size=64, kv_heads=2, group=3)
    q, kv = jnp.zeros((4, 6, 128), jnp.bfloat16), jnp.zeros(gpu.GpuLayout(**SIZES).shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="the plan is of blocks of 64 tokens; got a store of 16"):
        gpu.attend_planned(q, q[:, :2], q[:, :2], kv, plan, gpu.GpuLayout(**SIZES))


@pytest.mark.parametrize("planned", ["xla", "gpu"])
def test_tokens_before_the_first_rows_are_padding(planned):
    table, zero = jnp.arange(4, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
    step = (table, zero, jnp.array([3, 4]), jnp.array([10]), jnp.array(1))
    if planned == "gpu":
        blocks = gpu.plan_step(*step, num_tokens=5, block_size=16, kv_heads=1, group=1).token_block
        np.testing.assert_array_equal(blocks, [-1, -1, -1, 0, -1])
    else:
        batch = prepare_batch(*step, num_tokens=5, block_size=16, num_blocks=4)
        np.testing.assert_array_equal(batch.write_index, [80, 80, 80, 9, 80])


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e3, 1e6, 1e8])
def test_a_soft_cap_of_any_size_is_a_tanh(cap):
    products = np.concatenate([np.linspace(-90, 90, 1001), cap * np.linspace(-0.1, 0.1, 1001)]).astype(np.float32)
    scores = base2_scores(jnp.asarray(products), jnp.float32(1), cap) / LOG2E
    right = cap * np.tanh(products.astype(np.float64) / cap)
    np.testing.assert_allclose(scores, right, rtol=1e-5, atol=1e-30)
