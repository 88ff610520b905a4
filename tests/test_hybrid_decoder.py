"""Sinks, soft caps, windows with a rope of their own, post-norms and experts: the decoder's parts, and all of them
together against an independent float64 oracle, in combinations that no family has.
"""

import dataclasses
import json
from pathlib import Path

import family_checkpoints as checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cbjax.attention import DenseAttend
from cbjax.checkpoints import load
from cbjax.models import (
    DecoderConfig,
    ExpertsConfig,
    LinearScaling,
    RopeConfig,
    YarnScaling,
    abstract_params,
    build,
    flatten,
)
from cbjax.models.layers import RMSNorm
from cbjax.models.rope import inverse_frequencies, rope_tables

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "families.json").read_text())
HYBRID = DecoderConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
    rope=RopeConfig(theta=500.0, scaling=LinearScaling(factor=3.0)),
    local_rope=RopeConfig(theta=50.0),
    windows=(5, None),
    norm_offset=1.0,
    wide_norms=True,
    post_norms=True,
    sinks=True,
    activation="gelu_tanh",
    attention_scale=0.5,
    attention_soft_cap=2.0,
    logits_soft_cap=4.0,
)
EXPERTS = ExpertsConfig(num_experts=5, per_token=2, alpha=1.3, limit=0.8)
VARIANTS = {
    "gated": HYBRID,
    "experts": dataclasses.replace(HYBRID, experts=EXPERTS, norm_offset=0.0, post_norms=False, out_bias=True),
}


def random_params(config: DecoderConfig, dtype="float32", seed: int = 1):
    """Parameters of about the scale that `init_params` gives, without its compilation."""
    rng = np.random.default_rng(seed)

    def values(path, leaf):
        norm = (1.0 - config.norm_offset) if "norm" in str(path) else 0.0
        noise = rng.standard_normal(leaf.shape) * (0.1 if leaf.ndim == 1 else 0.3)
        return jnp.asarray(norm + noise, dtype)

    return jax.tree.map_with_path(values, abstract_params(config, dtype))


def dense_logits(config: DecoderConfig, params, tokens) -> np.ndarray:
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    model = nnx.merge(build(config), params)
    return np.asarray(model.logits(model.hidden(jnp.asarray(tokens, jnp.int32), positions, DenseAttend(positions))))


class Oracle:
    """The decoder by the definitions in `DecoderConfig`, in float64, one token, head and expert at a time."""

    def __init__(self, config: DecoderConfig, params):
        self.config = config
        self.get = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params).items()}

    def __call__(self, tokens) -> np.ndarray:
        x = self.get["embed", "weight"][tokens]
        for i in range(self.config.num_layers):
            x = x + self.post_norm(i, "attn", self.attention(i, self.norm(("layers", i, "attn_norm"), x)))
            x = x + self.post_norm(i, "mlp", self.mlp(i, self.norm(("layers", i, "mlp_norm"), x)))
        logits = self.norm(("norm",), x) @ self.get["head", "weight"].T
        return self.config.logits_soft_cap * np.tanh(logits / self.config.logits_soft_cap)

    def linear(self, path, x):
        return x @ self.get[*path, "weight"].T + self.get.get((*path, "bias"), 0.0)

    def norm(self, path, x):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * (self.get[*path, "weight"] + self.config.norm_offset)

    def post_norm(self, i, branch, x):
        return self.norm(("layers", i, f"{branch}_post_norm"), x) if self.config.post_norms else x

    def attention(self, i, x):
        config, path = self.config, ("layers", i, "attn")
        q, k, v = (self.linear((*path, name), x).reshape(len(x), -1, config.head_dim) for name in "qkv")
        q, k = (np.stack([self.rotate(i, row, at) for at, row in enumerate(rows)]) for rows in (q, k))
        mixed, group = np.zeros_like(q), config.num_heads // config.num_kv_heads
        for at in range(len(x)):
            first = 0 if config.windows[i] is None else max(0, at + 1 - config.windows[i])
            for head in range(config.num_heads):
                scores = k[first : at + 1, head // group] @ q[at, head] * config.attention_scale
                weights = np.exp(config.attention_soft_cap * np.tanh(scores / config.attention_soft_cap))
                total = weights.sum() + np.exp(self.get[*path, "sinks"][head])
                mixed[at, head] = weights / total @ v[first : at + 1, head // group]
        return self.linear((*path, "o"), mixed.reshape(len(x), -1))

    def rotate(self, i, x, position):
        half = self.config.head_dim // 2
        theta, factor = (500.0, 3.0) if self.config.windows[i] is None else (50.0, 1.0)
        angle = position / factor * theta ** -(np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = x[:, :half], x[:, half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def mlp(self, i, x):
        path, experts = ("layers", i, "mlp"), self.config.experts
        if experts is None:
            gate = self.linear((*path, "gate"), x)
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            return self.linear((*path, "down"), gelu * self.linear((*path, "up"), x))
        out = np.zeros_like(x)
        for row, scores in enumerate(self.linear((*path, "router"), x)):
            chosen = np.argsort(-scores)[: experts.per_token]
            weights = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
            for expert, weight in zip(chosen, weights, strict=True):
                out[row] += weight * self.expert(path, expert, x[row])
        return out

    def expert(self, path, expert, x):
        get, limit = self.get, self.config.experts.limit
        both = get[*path, "gate_up", "weight"][expert] @ x + get[*path, "gate_up", "bias"][expert]
        gate, up = np.minimum(both[:40], limit), np.clip(both[40:], -limit, limit)
        gated = (up + 1) * gate / (1 + np.exp(-self.config.experts.alpha * gate))
        return get[*path, "down", "weight"][expert] @ gated + get[*path, "down", "bias"][expert]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_float64_oracle(name):
    config = VARIANTS[name]
    params, tokens = random_params(config), np.random.default_rng(0).integers(61, size=24)
    expected = Oracle(config, params)(tokens)
    np.testing.assert_allclose(dense_logits(config, params, tokens), expected, atol=1e-4, rtol=1e-4)


def test_parameters_of_sinks_post_norms_and_experts_have_the_agreed_paths_and_shapes():
    plain = {path: leaf.shape for path, leaf in flatten(abstract_params(HYBRID)).items()}
    layer = {path[2:]: shape for path, shape in plain.items() if path[:2] == ("layers", 1)}
    assert layer["attn", "sinks"] == (6,)
    assert layer["attn_post_norm", "weight"] == layer["mlp_post_norm", "weight"] == (24,)
    mlp = abstract_params(VARIANTS["experts"])["layers"][1]["mlp"]
    assert {path: leaf.shape for path, leaf in flatten(mlp).items()} == {
        ("router", "weight"): (5, 24),
        ("router", "bias"): (5,),
        ("gate_up", "weight"): (5, 80, 24),
        ("gate_up", "bias"): (5, 80),
        ("down", "weight"): (5, 24, 40),
        ("down", "bias"): (5, 24),
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attention_soft_cap": None}),
        ("gemma2", {"logits_soft_cap": None}),
        ("gemma2", {"windows": None}),
        ("gemma2", {"windows": (None, 8)}),
        ("gemma2", {"windows": (9, None)}),
        ("gemma2", {"norm_offset": 0.0}),
        ("gemma2", {"activation": "silu"}),
        ("gemma2", {"attention_scale": None}),
        ("gemma2", {"embedding_multiplier": 1.0}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"rope": RopeConfig(theta=1e6)}),
        ("gemma3", {"rope": RopeConfig(theta=100.0, scaling=LinearScaling(factor=2.0))}),
        ("gpt_oss", {"rope": RopeConfig(theta=150_000.0)}),
        ("gpt_oss", {"experts": ExpertsConfig(num_experts=4, per_token=2, alpha=1.702, limit=7.0)}),
        ("gpt_oss", {"experts": ExpertsConfig(num_experts=4, per_token=2, alpha=1.0, limit=2.0)}),
        ("gpt_oss", {"experts": ExpertsConfig(num_experts=4, per_token=1, alpha=1.702, limit=2.0)}),
    ],
)
def test_the_goldens_tell_each_setting_from_its_neighbour(family, changes, loaded):
    """Far beyond the tolerance with which the logits are compared: a setting that got lost would not pass."""
    config, params = loaded(family)
    record = GOLDENS[family][checkpoints.LOGITS_PROMPT]
    changed = dense_logits(dataclasses.replace(config, **changes), params, record["prompt_ids"])
    assert np.abs(changed[-checkpoints.LOGITS_POSITIONS :] - record["logits"]).max() > 0.01


def test_the_goldens_tell_sinks_from_none(loaded):
    config, params = loaded("gpt_oss")
    far = jax.tree.map_with_path(lambda path, leaf: leaf - 1e4 if "sinks" in str(path[-1]) else leaf, params)
    record = GOLDENS["gpt_oss"][checkpoints.LOGITS_PROMPT]
    changed = dense_logits(config, far, record["prompt_ids"])
    assert np.abs(changed[-checkpoints.LOGITS_POSITIONS :] - record["logits"]).max() > 0.01


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """family -> (configuration, parameters), each read once."""
    found = {}

    def get(family):
        if family not in found:
            checkpoint = load(checkpoints.write(family, tmp_path_factory.mktemp(family)))
            found[family] = checkpoint.config, checkpoint.params
        return found[family]

    return get


# transformers 5.24, _compute_yarn_parameters, head_dim 16, theta 150000.
YARN_PUBLISHED = {
    YarnScaling(factor=32.0, original_max_positions=4096, truncate=False): [
        1.0,
        0.22541800141334534,
        0.05081327259540558,
        0.006794959306716919,
        0.0004564839182421565,
        1.818833698052913e-05,
        4.099978468730114e-06,
        9.242089618055616e-07,
    ],
    YarnScaling(factor=8.0, original_max_positions=256, beta_fast=8.0): [
        1.0,
        0.22541800141334534,
        0.028582464903593063,
        0.0014317783061414957,
        0.0003227486158721149,
        7.275334792211652e-05,
        1.6399913874920458e-05,
        3.6968358472222462e-06,
    ],
}


@pytest.mark.parametrize("scaling", YARN_PUBLISHED)
def test_yarn_frequencies_are_those_of_transformers(scaling):
    frequencies = inverse_frequencies(RopeConfig(theta=150_000.0, scaling=scaling), 16)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, YARN_PUBLISHED[scaling], rtol=3e-7)


def test_yarn_multiplies_cosines_and_sines():
    scaling = YarnScaling(factor=1.0, original_max_positions=64, attention_factor=1.5)
    positions = jnp.arange(5, dtype=jnp.int32)
    plain = rope_tables(RopeConfig(), 8, positions, jnp.float32)
    scaled = rope_tables(RopeConfig(scaling=scaling), 8, positions, jnp.float32)
    np.testing.assert_allclose(scaled.cos, plain.cos * 1.5, rtol=1e-6)
    np.testing.assert_allclose(scaled.sin, plain.sin * 1.5, rtol=1e-6)


def test_norm_weights_of_bfloat16_lose_nothing_to_the_offset():
    """1 + 2**-10 is 1 in bfloat16; x * (1 + w) is computed in float32 and rounded once, as in transformers."""
    norm = RMSNorm(64, eps=0.0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), offset=1.0, wide=True)
    weight = (np.random.default_rng(0).standard_normal(64) * 2.0**-8).astype(jnp.bfloat16)
    norm.weight[...] = jnp.asarray(weight)
    x = jnp.asarray(np.random.default_rng(1).choice([-1.75, 1.75], (3, 64)), jnp.bfloat16)
    expected = (np.sign(np.float32(x)) * (np.float32(1.0) + np.float32(weight))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), expected)
    assert (expected != np.sign(x)).any()


@pytest.mark.parametrize(("dtype", "multiplier"), [("bfloat16", 55.5), ("float32", np.float32(3072**0.5))])
def test_a_rounded_embedding_multiplier_is_that_of_the_models_dtype(dtype, multiplier):
    config = dataclasses.replace(
        HYBRID, num_layers=1, windows=None, embedding_multiplier=3072**0.5, round_embedding_multiplier=True
    )
    model = nnx.merge(build(config, dtype), random_params(config, dtype))
    seen = []
    model.layers[0] = lambda layer, x, rope, attend: seen.append(x) or x
    tokens = jnp.arange(61, dtype=jnp.int32)
    model.hidden(tokens, tokens, DenseAttend(tokens))
    rows = np.asarray(model.embed.weight[...]).astype(np.float32)
    np.testing.assert_array_equal(seen[0], (rows * np.float32(multiplier)).astype(dtype))


def mlp_of(config: DecoderConfig, params):
    return nnx.merge(build(config, params["embed"]["weight"].dtype), params).layers[0].mlp


@pytest.mark.parametrize(("dtype", "least"), [("float32", 64), ("bfloat16", 2)])
def test_invariant_4_experts_give_a_token_the_same_bits_however_many_there_are(dtype, least):
    config = dataclasses.replace(VARIANTS["experts"], hidden_size=64, intermediate_size=128)
    params = random_params(config, dtype)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 64)), dtype)
    run = jax.jit(lambda params, x: mlp_of(config, params)(x))
    whole = run(params, x)
    for tokens in (2, 3, 31, 64, 100):
        if tokens >= least:
            np.testing.assert_array_equal(run(params, x[:tokens]), whole[:tokens], err_msg=f"{tokens} tokens")


def test_an_expert_that_was_not_chosen_adds_nothing_even_if_it_is_not_finite():
    experts = mlp_of(VARIANTS["experts"], random_params(VARIANTS["experts"]))
    experts.router.bias[...] = jnp.array([99.0, -99.0, 99.0, -99.0, -99.0])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 24)), jnp.float32)
    before = experts(x)
    experts.down.bias[...] = experts.down.bias[...].at[jnp.array([1, 3, 4])].set(jnp.nan)
    np.testing.assert_array_equal(experts(x), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(HYBRID, attention_soft_cap=0.0), "attention_soft_cap must be None or positive"),
        (lambda: dataclasses.replace(HYBRID, logits_soft_cap=-1.0), "logits_soft_cap must be None or positive"),
        (lambda: dataclasses.replace(HYBRID, activation="gelu"), "activation must be one of silu, gelu_tanh"),
        (lambda: dataclasses.replace(EXPERTS, num_experts=0), "num_experts must be positive"),
        (lambda: dataclasses.replace(EXPERTS, per_token=6), "per_token must be at most self.num_experts=5"),
        (lambda: dataclasses.replace(EXPERTS, limit=0.0), "limit must be positive"),
        (lambda: YarnScaling(factor=0.0, original_max_positions=1), "factor must be positive"),
        (lambda: YarnScaling(factor=2.0, original_max_positions=0), "original_max_positions must be positive"),
        (lambda: YarnScaling(factor=2.0, original_max_positions=1, beta_fast=0.5), "beta_fast must be at least"),
        (
            lambda: RopeConfig(theta=1.0, scaling=YarnScaling(factor=2.0, original_max_positions=1)),
            "theta must be above 1 for YarnScaling",
        ),
    ],
)
def test_impossible_hybrid_configurations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
