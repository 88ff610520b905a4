"""Gemma 2 and Gemma 3 (text): norms around attention and MLP, a GELU, scaled embeddings, local and global layers.

Gemma 2 caps scores and logits; Gemma 3 norms the heads instead, and its local layers rotate with a base of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbjax.models.config import DecoderConfig
from cbjax.models.families import hf
from cbjax.models.families.family import Family, NameTable, TensorRule
from cbjax.models.families.gemma_gguf import GEMMA2_GGUF, GEMMA3_GGUF
from cbjax.models.families.names import HF_NAMES
from cbjax.models.families.reading import integer, number, unsupported
from cbjax.models.rope_config import RopeConfig

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS = _DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA3_DEFAULTS = _DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window_pattern": 6}
_FULL, _SLIDING = "full_attention", "sliding_attention"

_NAMES = NameTable(
    rules={
        **HF_NAMES.rules,
        "layers/{i}/attn_post_norm/weight": TensorRule(name="model.layers.{i}.post_attention_layernorm.weight"),
        "layers/{i}/mlp_norm/weight": TensorRule(name="model.layers.{i}.pre_feedforward_layernorm.weight"),
        "layers/{i}/mlp_post_norm/weight": TensorRule(name="model.layers.{i}.post_feedforward_layernorm.weight"),
    },
    ignored=HF_NAMES.ignored,
)


def _gemma2_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_GEMMA2_DEFAULTS, **config}
    return _read(config, pattern=2, attention_soft_cap=_cap(config, "attn_logit_softcapping"))


def _gemma3_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_GEMMA3_DEFAULTS, **config}
    if cap := config.get("attn_logit_softcapping"):
        raise unsupported("attn_logit_softcapping", cap, ["null"])
    rope, local_rope = _gemma3_ropes(config)
    pattern = integer(config, "sliding_window_pattern")
    return _read(config, pattern=pattern, qk_norm=True, rope=rope, local_rope=local_rope)


def _read(config: Mapping[str, Any], *, pattern: int, **own: Any) -> DecoderConfig:
    """What the two share. Of every `pattern` layers the last sees the whole context, unless `layer_types` differs."""
    if config.get("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention", True, ["false: causal attention"])
    if pattern < 1:
        raise ValueError(f"'sliding_window_pattern' in the model's configuration must be positive. Got {pattern}.")
    slides = [(layer + 1) % pattern != 0 for layer in range(integer(config, "num_hidden_layers"))]
    return hf.read_decoder(
        {**config, "hidden_act": _activation(config)},
        **hf.read_biases({"attention_bias": config.get("attention_bias")}),
        norm_offset=1.0,
        wide_norms=True,
        post_norms=True,
        windows=hf.layer_windows(config, slides),
        embedding_multiplier=integer(config, "hidden_size") ** 0.5,
        round_embedding_multiplier=True,
        attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
        logits_soft_cap=_cap(config, "final_logit_softcapping"),
        **own,
    )


def _activation(config: Mapping[str, Any]) -> str:
    """`hidden_activation` counts; `hidden_act`, which older files have as well, must not contradict it."""
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return activation if config.get("hidden_act") in (None, activation) else config["hidden_act"]


def _cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def _gemma3_ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of the global and of the local layers.

    Either `rope_parameters` by kind of layer, or `rope_theta` with `rope_scaling` and `rope_local_base_freq`.
    """
    by_kind = dict(config.get("rope_parameters") or {})
    if not set(by_kind) <= {_FULL, _SLIDING}:
        raise unsupported("rope_parameters", by_kind, [f"values for {_FULL} and {_SLIDING}"])
    whole = {"rope_theta": config.get("rope_theta"), **(by_kind.get(_FULL) or {}), **(config.get("rope_scaling") or {})}
    local = {"rope_theta": config.get("rope_local_base_freq"), **(by_kind.get(_SLIDING) or {})}
    shared = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    return (
        hf.read_rope(shared | {"rope_parameters": whole | {"rope_theta": number(whole, "rope_theta", 1_000_000.0)}}),
        hf.read_rope(shared | {"rope_parameters": local | {"rope_theta": number(local, "rope_theta", 10_000.0)}}),
    )


GEMMA2 = Family(
    hf_architecture="Gemma2ForCausalLM",
    hf_model_type="gemma2",
    from_hf=_gemma2_from_hf,
    hf_names=_NAMES,
    gguf=GEMMA2_GGUF,
)

GEMMA3 = Family(
    hf_architecture="Gemma3ForCausalLM",
    hf_model_type="gemma3_text",
    from_hf=_gemma3_from_hf,
    hf_names=_NAMES,
    gguf=GEMMA3_GGUF,
)
