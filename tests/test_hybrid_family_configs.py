"""Gemma 2, Gemma 3 and gpt-oss: what of a config.json reaches the decoder, and what is refused."""

import math
from typing import Any

import family_checkpoints as checkpoints
import numpy as np
import pytest

from cbjax import CausalLM
from cbjax.models import DecoderConfig, ExpertsConfig, LinearScaling, RopeConfig, YarnScaling
from cbjax.models.families import family_of_hf

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 8}


def read(family: str, **changes: Any) -> DecoderConfig:
    config = checkpoints.config_of(family) | changes
    return family_of_hf(config).from_hf(config)


def read_published(architecture: str, num_hidden_layers: int, **settings: Any) -> DecoderConfig:
    """A config.json with sizes and `settings`: all else has the family's defaults."""
    config = {"architectures": [architecture], "num_hidden_layers": num_hidden_layers} | SIZES | settings
    return family_of_hf(config).from_hf(config)


def test_gemma2_defaults_are_those_of_transformers():
    config = read_published("Gemma2ForCausalLM", 4)
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_soft_cap, config.logits_soft_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 256, 8192)
    assert (config.tie_embeddings, config.qk_norm, config.qkv_bias) == (True, False, False)
    assert (config.norm_offset, config.wide_norms, config.post_norms) == (1.0, True, True)
    assert (config.activation, config.embedding_multiplier, config.round_embedding_multiplier) == (
        "gelu_tanh",
        8.0,
        True,
    )
    assert (config.rope, config.local_rope) == (RopeConfig(theta=10_000.0), None)


def test_gemma2_takes_what_the_file_says():
    config = read_published(
        "Gemma2ForCausalLM",
        3,
        query_pre_attn_scalar=144,
        attn_logit_softcapping=None,
        final_logit_softcapping=20.0,
        sliding_window=7,
        layer_types=[FULL, SLIDING, SLIDING],
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    assert (config.attention_soft_cap, config.logits_soft_cap) == (None, 20.0)
    assert config.attention_scale == pytest.approx(1 / 12)
    assert config.windows == (None, 7, 7)
    assert (config.qkv_bias, config.out_bias, config.rope.theta) == (True, True, 5e5)
    assert read_published("Gemma2ForCausalLM", 2, layer_types=[FULL, FULL]).windows is None


def test_gemma3_defaults_are_those_of_transformers():
    config = read_published("Gemma3ForCausalLM", 7)
    assert config.windows == (4096,) * 5 + (None, 4096)
    assert (config.rope, config.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert [config.layer_rope(layer).theta for layer in range(7)] == [1e4] * 5 + [1e6, 1e4]
    assert (config.attention_soft_cap, config.logits_soft_cap, config.qk_norm) == (None, None, True)
    assert config.max_positions == 131_072
    assert read_published("Gemma3ForCausalLM", 4, sliding_window_pattern=2).windows == (4096, None) * 2
    assert read_published("Gemma3ForCausalLM", 4, sliding_window_pattern=1).windows is None


# transformers 5 writes `rope_parameters` for each kind of layer, before there were three keys.
GEMMA3_ROPES = [
    {},
    {
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    },
]


@pytest.mark.parametrize("spelling", GEMMA3_ROPES)
def test_gemma3_both_spellings_of_rope(spelling):
    config = read("gemma3", **spelling)
    assert config.rope == RopeConfig(theta=1e6, scaling=LinearScaling(factor=2.0))
    assert config.local_rope == RopeConfig(theta=100.0)


def test_gpt_oss_defaults_are_those_of_transformers():
    config = read_published("GptOssForCausalLM", 4)
    assert config.windows == (128, None, 128, None)
    assert config.experts == ExpertsConfig(num_experts=128, per_token=4, alpha=1.702, limit=7.0)
    assert (config.sinks, config.qkv_bias, config.out_bias, config.wide_norms) == (True, True, True, True)
    assert (config.norm_offset, config.post_norms, config.tie_embeddings, config.head_dim) == (0.0, False, False, 64)
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_positions, scaling.truncate) == (32.0, 4096, False)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert config.rope.theta == 150_000.0


def test_gpt_oss_other_ropes():
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    spelled = [{"rope_scaling": yarn}, {"rope_scaling": None, "rope_parameters": yarn | {"attention_factor": 1.5}}]
    first, second = (read("gpt_oss", **changes).rope.scaling for changes in spelled)
    expected = {"factor": 4.0, "original_max_positions": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    assert first == YarnScaling(**expected, attention_factor=0.1 * math.log(4) + 1)
    assert second == YarnScaling(**expected, attention_factor=1.5)
    assert read("gpt_oss", rope_scaling={"rope_type": "default"}).rope == RopeConfig(theta=150_000.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma2",
            {"hidden_activation": "relu", "hidden_act": None},
            "hidden_act: 'relu'. Supported: silu, swish, gelu",
        ),
        ("gemma2", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True. Supported: false"),
        ("gemma2", {"sliding_window": None}, "must have 'sliding_window'"),
        ("gemma2", {"layer_types": [SLIDING, "chunked_attention"]}, "layer_types: 'chunked_attention'"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "'attn_logit_softcapping' .* must be a number"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "logits_soft_cap must be None or positive. Got 0.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0. Supported: null"),
        ("gemma3", {"sliding_window_pattern": 0}, "'sliding_window_pattern' .* must be positive. Got 0"),
        ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn"}}, "rope scaling type: 'yarn'. Supported: default, linear"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "Supported: values for full_attention and sliding"),
        ("gemma3", {"rope_parameters": {SLIDING: {"rope_type": "dynamic"}}}, "rope scaling type: 'dynamic'"),
        ("gemma3", {"num_local_experts": 8}, "num_local_experts: 8. Supported: none: dense models"),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh'. Supported: silu"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn"}}, "must have 'factor'"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "longrope"}}, "rope scaling type: 'longrope'"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "per_token must be at most self.num_experts=4. Got 5"),
        ("gpt_oss", {"swiglu_limit": None}, "must have 'swiglu_limit'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: 'gptq'"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
            r"quantization_config: 'mxfp4'. Supported: none: .*Mxfp4Config\(dequantize=True\)",
        ),
    ],
)
def test_settings_that_a_hybrid_family_refuses(family, changes, message):
    with pytest.raises(ValueError, match=message):
        read(family, **changes)


def test_gpt_oss_yarn_with_mscale_is_refused():
    rope = checkpoints.config_of("gpt_oss")["rope_scaling"] | {"mscale": 1.0}
    with pytest.raises(ValueError, match=r"mscale of yarn: 1.0. Supported: null"):
        read("gpt_oss", rope_scaling=rope)


def test_a_shape_that_is_stored_turned_round_is_checked_as_it_is_stored(tmp_path, monkeypatch):
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = checkpoints.tensors_of("gpt_oss")
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    monkeypatch.setattr(checkpoints, "tensors_of", lambda family: tensors)
    with pytest.raises(ValueError, match=rf"{name} \[4, 32, 48\] instead of \[4, 48, 32\]"):
        CausalLM.from_pretrained(checkpoints.write("gpt_oss", tmp_path))
