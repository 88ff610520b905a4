"""Paged attention: every implementation against the float64 reference, over shapes and features.

The TPU kernels run interpreted, once with copies done at once and races looked for, once with copies as late as may be
and memory full of NaN; the two find different mistakes (`test_kernels_planted_bugs.py`). The GPU kernels run
interpreted with both at once.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, Batch, Case, check, computable, make_batch, on_tpu

from pallas_kernels.paged_attention.tpu import softmax

MIXED = ((300, 5), (17, 17), (1, 1), (40, 1), (0, 0), (130, 70))
DECODES = ((300, 1), (1, 1), (17, 1), (256, 1), (0, 0), (257, 1), (16, 1), (5, 1), (33, 1))
CASES = {
    "mixed": Case(rows=MIXED),
    "decodes": Case(rows=DECODES),
    "a window": Case(rows=MIXED, window=100),
    "decodes in a window": Case(rows=DECODES, window=37),
    "narrow heads": Case(rows=MIXED, kv_heads=3, group=3, head_dim=64, block_size=32, sinks=True),
    "soft cap": Case(rows=MIXED, head_dim=16, group=1, options={"soft_cap": 2.0, "scale": 0.5}),
    "wide heads": Case(rows=DECODES, head_dim=256, block_size=128, dtype="bfloat16"),
    "bfloat16": Case(rows=MIXED, dtype="bfloat16", block_size=64, group=4),
    "odd heads": Case(rows=DECODES, head_dim=80, kv_heads=1, group=5, block_size=256, sinks=True),
    "more than int16 positions": Case(rows=((33_000, 1), (32_900, 3)), kv_heads=1, head_dim=64, block_size=256),
    "8-bit floats": Case(rows=MIXED, dtype="bfloat16", kv_dtype="float8_e4m3fn", block_size=32),
    "wide 8-bit floats": Case(
        rows=((90, 20), (70, 1)), kv_heads=1, head_dim=256, dtype="bfloat16", kv_dtype="float8_e4m3fn", window=50
    ),
    "8-bit integers": Case(rows=MIXED, dtype="bfloat16", kv_dtype="int8"),
}
SLOW_TO_INTERPRET = {
    "more than int16 positions",
    "a window",
    "decodes in a window",
    "wide heads",
    "odd heads",
    "8-bit floats",
    "wide 8-bit floats",
}
SLOW_ON_GPU = {"more than int16 positions", "a window", "odd heads"}


def _parameters():
    for name, case in CASES.items():
        for backend in BACKENDS:
            if backend == "xla" and jnp.dtype(case.store_dtype).itemsize == 1:
                continue  # it has no scales
            if backend == "gpu" and case.store_dtype == "int8":
                continue  # no form for it
            # Each case runs in one mode at least; the nightly run has all.
            is_slow = (backend == "tpu, on_wait" and name in SLOW_TO_INTERPRET) or (
                backend == "gpu" and name in SLOW_ON_GPU
            )
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(backend, case, id=f"{backend}: {name}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(_parameters()))
def test_outputs_and_store_equal_the_reference(backend, case):
    check(backend, case)


@st.composite
def _cases(draw):
    counts = st.one_of(st.just(1), st.integers(0, 40))
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        count = draw(counts)
        rows.append((count and count + draw(st.one_of(st.integers(0, 20), st.integers(200, 300))), count))
    head_dim = draw(st.sampled_from([16, 64, 128]))
    return Case(
        rows=tuple(rows),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=head_dim,
        block_size=draw(st.sampled_from([16, 32, 128])),
        window=draw(st.one_of(st.none(), st.integers(1, 300))),
        sinks=draw(st.booleans()),
        options=draw(st.sampled_from([{}, {"soft_cap": 1.5}, {"scale": 0.3}])),
        seed=draw(st.integers(0, 99)),
        padding_rows=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize("backend", ["tpu, eager", "gpu"])
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=_cases())
def test_drawn_batches_equal_the_reference(backend, case):
    check(backend, case)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=_cases())
def test_many_drawn_batches_equal_the_reference(backend, case):
    check(backend, case)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter, which is NumPy's
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("array", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["xla", "tpu, on_wait", "gpu"])
def test_invariant_6_a_row_with_numbers_that_are_none_fails_alone_and_is_seen_to(backend, array, value):
    """The second of three rows in one tile, and one that is decoded; rows of others are as if nothing were."""
    case = Case(rows=((4, 4), (3, 3), (20, 1), (5, 2)), kv_heads=1, group=1, padding_rows=0)
    batch = make_batch(computable(backend, case))
    expected, _ = BACKENDS[backend](batch)
    for row in (1, 2):
        bad = getattr(batch, array).copy()
        bad[batch.q_start[row]] = value
        out, _ = BACKENDS[backend](replace(batch, **{array: bad}))
        mine = slice(batch.q_start[row], batch.q_start[row + 1])
        assert not np.isfinite(np.asarray(out[mine], np.float32)).all(), "hidden"
        others = np.delete(np.asarray(out), mine, axis=0)
        np.testing.assert_array_equal(others, np.delete(np.asarray(expected), mine, axis=0))


def _dot_in_order(a, b, dimensions, **_):
    """A CPU's products and sums have an order that depends on the number of rows; this one's does not."""
    ((left,), (right,)), _ = dimensions
    a, b = (jnp.moveaxis(x.astype(jnp.float32), axis, 0) for x, axis in ((a, left), (b, right)))
    start = jnp.zeros((a.shape[1], b.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, len(a), lambda i, total: total + a[i][:, None] * b[i][None, :], start)


def test_invariant_4_a_tokens_bits_do_not_depend_on_the_kernel_that_computed_it(monkeypatch):
    """A prompt's last token, computed with all of it, in a piece with a few others, and alone by decode.

    So chunks, masks, sums and the order of all of them are the same; a TPU's matrix unit adds up as it does.
    """
    # Else a CPU may round a product and a sum once in one program and twice in another.
    exact = {"xla_disable_hlo_passes": "fusion"}
    monkeypatch.setattr(softmax.lax, "dot_general", _dot_in_order)
    monkeypatch.setattr(
        softmax, "over_lanes", lambda x: _dot_in_order(x, jnp.ones((1, 128), jnp.float32), (((1,), (1,)), ((), ())))
    )
    whole = Case(rows=((290, 290),), kv_heads=1, padding_rows=0)
    batch = make_batch(whole)
    out, kv = on_tpu("on_wait", batch, **exact)
    wanted, cells = np.asarray(out)[289], np.asarray(kv)
    for count in (1, 7):
        piece = _end_of(batch, cells, count)
        out, _ = on_tpu("on_wait", piece, **exact)
        assert np.asarray(out)[count - 1].tobytes() == wanted.tobytes()


def _end_of(batch: Batch, kv: np.ndarray, count: int) -> Batch:
    """The last tokens of a batch of one row as a batch of their own, over the store that the whole one left."""
    stop = int(batch.q_start[1])
    tokens = slice(stop - count, stop)
    return replace(
        batch,
        case=replace(batch.case, rows=((stop, count),)),
        q=batch.q[tokens],
        k=batch.k[tokens],
        v=batch.v[tokens],
        kv=kv,
        q_start=np.array([0, count], np.int32),
    )
