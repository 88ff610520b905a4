"""The decoder against an independent float64 oracle, its parameters as plain dicts, and its configuration."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cbjax.attention import DenseAttend, LayerSpec, record_layers
from cbjax.models import (
    Decoder,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    abstract_params,
    build,
    flatten,
    init_params,
    unflatten,
)
from cbjax.models.decoder import norm_heads
from cbjax.models.rope import inverse_frequencies, rope_tables

TINY = DecoderConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
)
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
VARIANTS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "mqa": {"num_kv_heads": 1, "head_dim": 12},
    "mha": {"num_kv_heads": 6, "rms_norm_eps": 0.1},
    "llama3": {"rope": RopeConfig(theta=500_000.0, scaling=LLAMA3)},
    "linear": {"rope": RopeConfig(scaling=LinearScaling(factor=4.0))},
}


def variant(name: str) -> DecoderConfig:
    return dataclasses.replace(TINY, **VARIANTS[name])


def make_tokens(count: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, TINY.vocab_size, count), jnp.int32)


def run_dense(config: DecoderConfig, params, tokens, dtype=jnp.float32) -> jax.Array:
    """Logits of every position of one sequence."""

    @jax.jit
    def run(params, tokens):
        model = nnx.merge(build(config, dtype), params)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return model.logits(model.hidden(tokens, positions, DenseAttend(positions)))

    return run(params, tokens)


def oracle(config: DecoderConfig, params, tokens) -> np.ndarray:
    """The same model by its published definition, in float64, one token and one head at a time."""
    get = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params).items()}

    def linear(path, x):
        return x @ get[*path, "weight"].T + get.get((*path, "bias"), 0.0)

    def norm(path, x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * get[*path, "weight"]

    half, frequencies = config.head_dim // 2, oracle_frequencies(config)

    def rotate(x, position):
        angle = position * np.concatenate([frequencies, frequencies])
        return x * np.cos(angle) + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * np.sin(angle)

    x = get["embed", "weight"][np.asarray(tokens)]
    group = config.num_heads // config.num_kv_heads
    for i in range(config.num_layers):
        layer = ("layers", i)
        normed = norm((*layer, "attn_norm"), x)
        q, k, v = (linear((*layer, "attn", name), normed).reshape(len(x), -1, config.head_dim) for name in "qkv")
        q, k = (np.stack([rotate(row, at) for at, row in enumerate(rows)]) for rows in (q, k))
        mixed = np.zeros_like(q)
        for at in range(len(x)):
            for head in range(config.num_heads):
                scores = k[: at + 1, head // group] @ q[at, head] / math.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[at, head] = weights / weights.sum() @ v[: at + 1, head // group]
        x = x + linear((*layer, "attn", "o"), mixed.reshape(len(x), -1))
        normed = norm((*layer, "mlp_norm"), x)
        gate = linear((*layer, "mlp", "gate"), normed)
        x = x + linear((*layer, "mlp", "down"), gate / (1 + np.exp(-gate)) * linear((*layer, "mlp", "up"), normed))
    head = get["embed" if config.tie_embeddings else "head", "weight"]
    return norm(("norm",), x) @ head.T


def oracle_frequencies(config: DecoderConfig) -> np.ndarray:
    frequencies = config.rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    match config.rope.scaling:
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_positions * frequencies / (2 * np.pi)
            blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            blend = np.clip(blend, 0.0, 1.0)
            return (1 - blend) * frequencies / scaling.factor + blend * frequencies
        case _:
            return frequencies


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_float64_oracle(name):
    config = variant(name)
    params = init_params(config, seed=1)
    tokens = make_tokens(70)
    np.testing.assert_allclose(run_dense(config, params, tokens), oracle(config, params, tokens), atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_near_float32():
    config = dataclasses.replace(variant("biases"), tie_embeddings=True)
    narrow = init_params(config, jnp.bfloat16, seed=1)
    assert {leaf.dtype for leaf in flatten(narrow).values()} == {jnp.dtype(jnp.bfloat16)}
    tokens = make_tokens(40)
    logits = run_dense(config, narrow, tokens, jnp.bfloat16)
    assert logits.dtype == jnp.float32
    exact = oracle(config, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow), tokens)
    assert np.abs(logits - exact).max() < 0.06 * np.abs(exact).max()


def test_positions_are_explicit():
    params = init_params(TINY, seed=1)
    model = nnx.merge(build(TINY), params)
    tokens, positions = make_tokens(6), jnp.arange(6, dtype=jnp.int32)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    in_order = model.hidden(tokens, positions, DenseAttend(positions))
    shuffled = model.hidden(tokens[order], positions[order], DenseAttend(positions[order]))
    np.testing.assert_allclose(shuffled, in_order[order], atol=1e-5)


def test_gradients_reach_every_parameter_under_checkpoint():
    tokens = make_tokens(12)
    positions = jnp.arange(12, dtype=jnp.int32)
    config = variant("biases")

    def loss(params):
        model = nnx.merge(build(config), params)
        hidden = jax.checkpoint(lambda tokens: model.hidden(tokens, positions, DenseAttend(positions)))(tokens)
        scores = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.mean(jnp.take_along_axis(scores[:-1], tokens[1:, None], axis=1))

    gradients = flatten(jax.jit(jax.grad(loss))(init_params(config, seed=1)))
    # Softmax does not see a shift of all keys of a query by the same amount.
    assert {path for path, leaf in gradients.items() if not np.abs(leaf).max() > 1e-7} <= {
        ("layers", i, "attn", "k", "bias") for i in range(config.num_layers)
    }


def test_an_id_outside_the_vocabulary_becomes_nan_and_no_other_token():
    params = init_params(TINY, seed=1)
    tokens = make_tokens(8)
    model = nnx.merge(build(TINY), params)
    for bad in (TINY.vocab_size, -1):
        rows = model.embed(tokens.at[5].set(bad))
        assert np.isnan(rows[5]).all()
        np.testing.assert_array_equal(np.delete(rows, 5, axis=0), params["embed"]["weight"][np.delete(tokens, 5)])


def test_greedy_generation_of_a_tiny_model_is_varied_and_has_no_near_ties():
    for config in (variant("untied"), variant("tied")):
        params = init_params(config, seed=3)
        logits = np.asarray(run_dense(config, params, make_tokens(100)))
        assert len(set(logits.argmax(-1).tolist())) > 15
        top = np.sort(logits, axis=-1)[:, -2:]
        assert np.median(top[:, 1] - top[:, 0]) > 0.1
        assert (top[:, 1] - top[:, 0]).min() > 1e-4


def test_recorded_layers_are_those_of_the_config():
    model = nnx.merge(build(TINY), init_params(TINY))
    assert record_layers(model.hidden) == (LayerSpec(num_heads=6, num_kv_heads=2, head_dim=8),) * 2


def test_parameter_tree_has_the_agreed_paths_shapes_and_dtype():
    flat = flatten(abstract_params(variant("biases"), jnp.bfloat16))
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in flat.values())
    expected = {("embed", "weight"): (61, 24), ("norm", "weight"): (24,), ("head", "weight"): (61, 24)}
    linears = {
        ("attn", "q"): (48, 24),
        ("attn", "k"): (16, 24),
        ("attn", "v"): (16, 24),
        ("attn", "o"): (24, 48),
        ("mlp", "gate"): (40, 24),
        ("mlp", "up"): (40, 24),
        ("mlp", "down"): (24, 40),
    }
    for i in range(2):
        expected |= {("layers", i, norm, "weight"): (24,) for norm in ("attn_norm", "mlp_norm")}
        for path, shape in linears.items():
            expected |= {("layers", i, *path, "weight"): shape, ("layers", i, *path, "bias"): shape[:1]}
    assert shapes == expected
    assert ("head", "weight") not in flatten(abstract_params(variant("tied")))
    assert not any(path[-1] == "bias" for path in flatten(abstract_params(TINY)))


def test_abstract_parameters_of_a_large_model_allocate_nothing():
    config = dataclasses.replace(TINY, vocab_size=10**7, hidden_size=10**5, intermediate_size=10**6)
    assert abstract_params(config)["embed"]["weight"].shape == (10**7, 10**5)


def test_initial_parameters_match_the_abstract_ones_and_depend_on_the_seed_only():
    params = init_params(TINY, jnp.bfloat16, seed=5)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract_params(TINY, jnp.bfloat16)
    )
    again, other = init_params(TINY, jnp.bfloat16, seed=5), init_params(TINY, jnp.bfloat16, seed=6)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, again)
    assert all(jax.tree.leaves(same))
    assert not (params["embed"]["weight"] == other["embed"]["weight"]).all()


def test_flatten_and_unflatten_are_inverse():
    params = abstract_params(TINY)
    assert unflatten(flatten(params)) == params
    assert flatten({"layers": {0: {"x": 1}, 1: {"x": 2}}}) == {("layers", 0, "x"): 1, ("layers", 1, "x"): 2}
    for overlapping in ({("a",): 1, ("a", "b"): 2}, {("a", "b"): 2, ("a",): 1}):
        with pytest.raises(ValueError, match="must not start with one another"):
            unflatten(overlapping)


def test_new_weights_of_the_same_shapes_do_not_recompile():
    graphdef = build(TINY)
    traces = []

    @jax.jit
    def step(params, tokens):
        traces.append(1)
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return nnx.merge(graphdef, params).hidden(tokens, positions, DenseAttend(positions))

    first, second = (step(init_params(TINY, seed=seed), make_tokens(4)) for seed in (0, 1))
    assert len(traces) == 1
    assert not np.allclose(first, second)
    assert build(TINY) == graphdef
    assert hash(build(TINY)) == hash(graphdef)


def test_module_made_directly_is_the_one_that_is_built():
    module = Decoder(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    assert graphdef == build(TINY)
    assert nnx.to_pure_dict(state).keys() == abstract_params(TINY).keys()


def test_llama3_frequencies_are_those_of_transformers():
    # transformers 5.24, _compute_llama3_parameters, head_dim 16, theta 500000, factors 8, 1, 4, original length 64.
    published = [
        1.0,
        0.07940301299095154,
        0.004700753837823868,
        0.0009115831344388425,
        0.00017677668074611574,
        3.428102354519069e-05,
        6.647869668086059e-06,
        1.289173155782919e-06,
    ]
    config = RopeConfig(theta=500_000.0, scaling=LLAMA3)
    np.testing.assert_allclose(inverse_frequencies(config, 16), published, rtol=1e-7)


def test_rope_tables_are_exact_at_far_positions():
    positions = jnp.array([0, 1, 1_000, 131_071, 1_000_003], jnp.int32)
    tables = rope_tables(RopeConfig(), 8, positions, jnp.float32)
    angles = np.float32(positions)[:, None] * inverse_frequencies(RopeConfig(), 8)[None]
    np.testing.assert_allclose(tables.cos[:, 0], np.cos(np.float64(angles)), atol=1e-6)
    np.testing.assert_allclose(tables.sin[:, 0], np.sin(np.float64(angles)), atol=1e-6)
    assert rope_tables(RopeConfig(), 8, positions, jnp.bfloat16).cos.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_layers": 0}, ValueError, "num_layers must be positive. Got 0"),
        ({"vocab_size": 1.5}, TypeError, "vocab_size must be an int. Got 1.5"),
        ({"num_heads": 5}, ValueError, "num_heads must be a multiple of self.num_kv_heads=2. Got 5"),
        ({"head_dim": 7}, ValueError, "head_dim must be even"),
        ({"rms_norm_eps": -1.0}, ValueError, "rms_norm_eps must not be negative"),
        ({"windows": (4,)}, ValueError, "windows must be None or a tuple with a value for each of 2 layers"),
        ({"windows": (4, 0)}, ValueError, "windows must hold positive integers or None"),
        ({"rope_layers": (True,) * 3}, ValueError, "rope_layers must be None or a tuple with a value for each of 2"),
        ({"logits_divisor": 0.0}, ValueError, "logits_divisor must not be 0"),
    ],
)
def test_impossible_configurations_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_4_normed_heads_are_the_same_bits_however_many_tokens(dtype):
    config = dataclasses.replace(TINY, qk_norm=True, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=64)
    graphdef, params = build(config, dtype), init_params(config, dtype, seed=3)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((512, 4, 64)), dtype)

    @jax.jit
    def run(params, q):
        attn = nnx.merge(graphdef, params).layers[0].attn
        return norm_heads(attn.q_norm, q), norm_heads(attn.k_norm, q[:, :1])

    whole = run(params, x)
    for tokens in (2, 3, 5, 8, 16, 31, 64, 128, 256):
        for part, all_tokens in zip(run(params, x[:tokens]), whole, strict=True):
            np.testing.assert_array_equal(part, all_tokens[:tokens], err_msg=f"{tokens} tokens")


def test_multipliers_of_one_leave_the_program_as_it_is():
    def program(**fields):
        config = dataclasses.replace(TINY, **fields)
        graphdef, params = build(config), init_params(config)
        positions = jnp.arange(3, dtype=jnp.int32)

        def run(params, tokens):
            model = nnx.merge(graphdef, params)
            return model.logits(model.hidden(tokens, positions, DenseAttend(positions)))

        return str(jax.make_jaxpr(run)(params, make_tokens(3)))

    ones = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_divisor": 1.0}
    assert program(**ones, windows=(None, None), rope_layers=(True, True)) == program()
    for name in ones:
        assert program(**{name: 2.0}).count(" mul ") + program(**{name: 2.0}).count(" div ") > (
            program().count(" mul ") + program().count(" div ")
        )


def test_impossible_rope_settings_are_refused():
    with pytest.raises(ValueError, match=r"theta must be positive\. Got 0\.0"):
        RopeConfig(theta=0.0)
    with pytest.raises(TypeError, match="scaling must be None, Llama3Scaling or LinearScaling"):
        RopeConfig(scaling="yarn")
    with pytest.raises(ValueError, match="factor must be positive"):
        LinearScaling(factor=0.0)
    with pytest.raises(ValueError, match=r"high_freq_factor must be above low_freq_factor=4\.0. Got 1\.0"):
        Llama3Scaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_positions=8192)
