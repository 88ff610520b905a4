"""The `attend` contract: dense attention against a naive oracle, recording, and the life of `PagedAttend`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_rows import one_store

from cbjax.attention import DenseAttend, KVSpec, LayerSpec, PagedAttend, prepare_batch, record_layers

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 9, 4, 2, 6
SINKS = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
OPTIONS = [
    {},
    {"scale": 0.3},
    {"window": 3},
    {"soft_cap": 0.5},
    {"sinks": SINKS},
    {"scale": 2.0, "window": 4, "soft_cap": 1.5, "sinks": SINKS},
]


def qkv(seed: int = 0, tokens: int = TOKENS) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, HEADS, HEAD_DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, KV_HEADS, HEAD_DIM), dtype=np.float32)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def naive(q, k, v, positions, segments, *, scale=None, window=None, soft_cap=None, sinks=None) -> np.ndarray:
    """Softmax attention, one query and one head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = HEAD_DIM**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for i in range(len(q)):
        seen = [
            j
            for j in range(len(q))
            if segments[i] == segments[j] and 0 <= positions[i] - positions[j] < (window or len(q))
        ]
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = np.array([q[i, head] @ k[j, shared] * scale for j in seen])
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(np.float64(sinks[head])))
            out[i, head] = sum(weight / total * v[j, shared] for weight, j in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_dense_equals_the_naive_oracle(options):
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    out = DenseAttend(positions)(0, *qkv(), **options)
    np.testing.assert_allclose(out, naive(*qkv(), positions, np.zeros(TOKENS), **options), atol=2e-6)


def test_dense_keeps_packed_segments_apart():
    positions = np.array([0, 1, 2, 3, 0, 1, 2, 0, 1], np.int32)
    segments = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2], np.int32)
    out = DenseAttend(jnp.asarray(positions), jnp.asarray(segments))(0, *qkv(), window=2)
    np.testing.assert_allclose(out, naive(*qkv(), positions, segments, window=2), atol=2e-6)


def test_dense_works_under_jit_grad_vmap_and_checkpoint():
    positions = jnp.arange(TOKENS, dtype=jnp.int32)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(DenseAttend(positions)(0, q, k, v, window=4, sinks=jnp.asarray(SINKS))))

    batch = [jnp.stack(arrays) for arrays in zip(qkv(0), qkv(1), strict=True)]
    plain = jax.grad(loss, argnums=(0, 1, 2))(*qkv(1))
    transformed = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))))(*batch)
    for expected, got in zip(plain, transformed, strict=True):
        np.testing.assert_allclose(got[1], expected, atol=1e-5)
    direction = jnp.ones_like(qkv(1)[1])
    step = 1e-2
    q, k, v = qkv(1)
    slope = (loss(q, k + step * direction, v) - loss(q, k - step * direction, v)) / (2 * step)
    np.testing.assert_allclose(jnp.sum(plain[1] * direction), slope, atol=5e-3)


def test_dense_result_has_the_dtype_of_the_queries():
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    narrow = [x.astype(jnp.bfloat16) for x in qkv()]
    out = DenseAttend(positions)(0, *narrow)
    assert out.dtype == jnp.bfloat16
    exact = naive(*(x.astype(jnp.float32) for x in narrow), positions, np.zeros(TOKENS))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)


def two_layers(tokens, positions, attend):
    """A model by contract, without weights; its second layer has other heads and a window."""
    x = (tokens + positions).astype(jnp.float32)[:, None, None] * jnp.ones((1, HEADS, HEAD_DIM))
    x = attend(0, x, x[:, :KV_HEADS], x[:, :KV_HEADS])
    return attend(1, x, x[:, :1], x[:, :1], window=8)


def test_recording_tells_heads_width_and_window_of_every_layer():
    assert record_layers(two_layers) == (
        LayerSpec(num_heads=4, num_kv_heads=2, head_dim=6, window=None),
        LayerSpec(num_heads=4, num_kv_heads=1, head_dim=6, window=8),
    )


def test_recording_refuses_a_model_that_breaks_the_contract():
    x = jnp.ones((2, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="never called"):
        record_layers(lambda tokens, positions, attend: tokens)
    with pytest.raises(ValueError, match="Got layer 1 in place of 0"):
        record_layers(lambda tokens, positions, attend: attend(1, x, x, x))
    with pytest.raises(ValueError, match="Got layer 0 in place of 1"):
        record_layers(lambda tokens, positions, attend: [attend(0, x, x, x) for _ in range(2)])
    scanned = lambda tokens, positions, attend: jax.lax.scan(  # noqa: E731
        lambda x, layer: (attend(layer, x, x, x), None), x, jnp.arange(2, dtype=jnp.int32)
    )
    with pytest.raises(TypeError, match=r"a Python int as layer.*cbjax\.attention\.paged_attention"):
        record_layers(scanned)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: ((q[0], k, v), {}), ValueError, r"layer 3: expected q \[tokens, heads, head_dim\]"),
        (lambda q, k, v: ((q, k[:4], v), {}), ValueError, r"layer 3: expected q .* k \(4, 2, 6\)"),
        (lambda q, k, v: ((q[:, :3], k, v), {}), ValueError, "multiple of kv_heads. Got 3 and 2"),
        (lambda q, k, v: ((q.astype(jnp.bfloat16), k, v), {}), TypeError, "must share a dtype. Got bfloat16"),
        (lambda q, k, v: ((q, k, v), {"window": 0}), ValueError, "at least 1. Got 0"),
        (lambda q, k, v: ((q, k, v), {"soft_cap": 0.0}), ValueError, "soft_cap must be positive. Got 0.0"),
        (lambda q, k, v: ((q, k, v), {"sinks": jnp.ones(2)}), ValueError, r"sinks \[heads\] = \(4,\). Got \(2,\)"),
        (lambda q, k, v: ((q[:2], k[:2], v[:2]), {}), ValueError, "expected 9 tokens, .* Got 2"),
    ],
)
def test_bad_calls_name_the_layer_and_the_rule(change, error, message):
    args, options = change(*qkv())
    with pytest.raises(error, match=message) as raised:
        DenseAttend(jnp.arange(TOKENS, dtype=jnp.int32))(3, *args, **options)
    assert "layer 3" in str(raised.value)


def test_segments_must_match_the_positions():
    with pytest.raises(ValueError, match=r"segment_ids must have the shape of positions \(9,\). Got \(3,\)"):
        DenseAttend(jnp.arange(9, dtype=jnp.int32), jnp.zeros(3, jnp.int32))


SPEC = KVSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=4, num_blocks=6)


def make_paged(layers: int = 2) -> PagedAttend:
    """One row of `TOKENS` new tokens."""
    batch = prepare_batch(
        jnp.array([[4, 0, 2], [6, 6, 6]], jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.array([0, TOKENS], jnp.int32),
        jnp.array([TOKENS], jnp.int32),
        jnp.int32(1),
        num_tokens=TOKENS,
        block_size=SPEC.block_size,
        num_blocks=SPEC.num_blocks,
    )
    return PagedAttend([SPEC.zeros()] * layers, [batch], one_store(layers, SPEC))


def test_paged_equals_dense_and_hands_back_the_stores():
    dense = DenseAttend(jnp.arange(TOKENS, dtype=jnp.int32))

    @jax.jit
    def step(q, k, v):
        attend = make_paged()
        outs = [attend(layer, q, k + layer, v, window=5) for layer in range(2)]
        return outs, attend.kv

    q, k, v = qkv()
    outs, stores = step(q, k, v)
    for layer in range(2):
        np.testing.assert_allclose(outs[layer], dense(layer, q, k + layer, v, window=5), atol=2e-6)
        keys = np.concatenate([np.asarray(stores[layer])[0, :, block] for block in (4, 0, 2)], axis=1)
        np.testing.assert_array_equal(keys[:, :TOKENS].swapaxes(0, 1), k + layer)


@pytest.mark.parametrize(
    "transform",
    [
        jax.checkpoint,
        lambda f: jax.vmap(f, in_axes=None, axis_size=2),
        lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0],
        lambda f: jax.jit(f),
    ],
    ids=["checkpoint", "vmap", "scan", "inner-jit"],
)
def test_paged_call_in_another_trace_is_refused_and_names_the_layer(transform):
    @jax.jit
    def step(q, k, v):
        attend = make_paged()
        q = attend(0, q, k, v)
        return transform(lambda q: attend(1, q, k, v))(q)

    with pytest.raises(RuntimeError, match=r"layer 1: PagedAttend was made in another trace.*paged_attention"):
        step(*qkv())


def test_paged_call_after_its_trace_is_refused():
    kept = []
    jax.jit(lambda: kept.append(make_paged()))()
    with pytest.raises(RuntimeError, match="layer 0: PagedAttend was made in another trace"):
        kept[0](0, *qkv())


def test_paged_call_that_does_not_fit_the_store_is_refused():
    attend = make_paged()
    q, k, v = qkv()
    with pytest.raises(ValueError, match="layer 2: the KV store has 2 layers, 0 to 1"):
        attend(2, q, k, v)
    with pytest.raises(ValueError, match=r"layer 0: the KV store has 2 kv heads of 6\. Got 1 of 6"):
        attend(0, q, k[:, :1], v[:, :1])


def test_kv_spec_shape_bytes_and_reserved_zone():
    spec = KVSpec(num_kv_heads=3, head_dim=64, block_size=256, num_blocks=32, dtype=jnp.bfloat16)
    assert spec.shape == (2, 3, 34, 256, 64)
    assert spec.block_bytes == 2 * 3 * 256 * 64 * 2
    assert spec.layer_bytes == 34 * spec.block_bytes == spec.zeros().nbytes
    assert (spec.read_trash, spec.sentinel, spec.write_trash) == (8192, 8193, 8448)
    assert spec.abstract() == jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
    assert hash(spec) == hash(KVSpec(num_kv_heads=3, head_dim=64, block_size=256, num_blocks=32, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_blocks", 0, "num_blocks must be at least 1. Got 0"), ("dtype", "int8", "floating dtype. Got int8")],
)
def test_kv_spec_refuses(field, value, message):
    fields = {"num_kv_heads": 1, "head_dim": 2, "block_size": 4, "num_blocks": 1, field: value}
    with pytest.raises(ValueError, match=message):
        KVSpec(**fields)
