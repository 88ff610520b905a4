"""Reading config.json: what the families share.

A key that is absent has its family's default, as in transformers' configuration class; null means "derive it".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbjax.models.config import DecoderConfig
from cbjax.models.families.reading import given, integer, number, per_layer, unsupported
from cbjax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_TYPES = ("default", "linear", "llama3")


def read_decoder(config: Mapping[str, Any], **own: Any) -> DecoderConfig:
    """The fields that all families spell alike; `own` are the family's fields of `DecoderConfig`, and win.

    Raises ValueError for a setting that is not supported or of the wrong type.
    """
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method")
        raise unsupported("quantization_config", method, ["none: float32, float16 or bfloat16 weights"])
    if (activation := given(config, "hidden_act", "silu")) not in _ACTIVATIONS:
        raise unsupported("hidden_act", activation, list(_ACTIVATIONS))
    for key in _EXPERT_KEYS:
        if config.get(key) and "experts" not in own:
            raise unsupported(key, config[key], ["none: dense models"])
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    fields = {
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": integer(config, "intermediate_size"),
        "num_layers": integer(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": integer(config, "num_key_value_heads", num_heads),
        "head_dim": integer(config, "head_dim", hidden_size // max(num_heads, 1)),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "activation": _ACTIVATIONS[activation],
        "max_positions": integer(config, "max_position_embeddings", 2048),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if "rope" not in own:
        fields["rope"] = read_rope(config)
    return DecoderConfig(**(fields | own))


def read_biases(config: Mapping[str, Any]) -> dict[str, bool]:
    """The bias fields of families that have `attention_bias` and `mlp_bias`."""
    attention = bool(config.get("attention_bias", False))
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": bool(config.get("mlp_bias", False))}


def read_windows(config: Mapping[str, Any], sliding_by_default: list[bool]) -> tuple[int | None, ...] | None:
    """`windows` of a family with `use_sliding_window`, `sliding_window` and `layer_types`.

    Without `layer_types` a layer slides where `sliding_by_default` (one per layer) says so.
    """
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return None
    return layer_windows(config, sliding_by_default)


def layer_windows(config: Mapping[str, Any], sliding_by_default: list[bool]) -> tuple[int | None, ...] | None:
    """`windows` of a family with `sliding_window` and `layer_types`; as `read_windows`, but never switched off."""
    kinds = per_layer(config, "layer_types", len(sliding_by_default))
    if kinds is None:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding_by_default]
    known = ("full_attention", "sliding_attention")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise unsupported("layer_types", unknown[0], known)
    if "sliding_attention" not in kinds:
        return None
    window = integer(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The one rope of all layers. Raises ValueError for a setting that is not supported or of the wrong type."""
    rope = rope_settings(config)
    kind = rope_type(rope)
    if kind not in _ROPE_TYPES:
        raise unsupported("rope scaling type", kind, _ROPE_TYPES)
    scaling = None if kind == "default" else _read_scaling(kind, rope)
    return RopeConfig(theta=number(rope, "rope_theta", 10_000.0), scaling=scaling)


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).

    Raises ValueError if layers differ or only a part of each head is rotated.
    """
    own = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if by_layer := {key: value for key, value in own.items() if isinstance(value, Mapping)}:
        raise unsupported("rope_parameters", by_layer, ["one rope for all layers"])
    rope = {**{key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}, **own}
    if (fraction := given(rope, "partial_rotary_factor", 1.0)) != 1.0:
        raise unsupported("partial_rotary_factor", fraction, ["1.0"])
    return rope


def rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of scaling that the settings name."""
    return given(rope, "rope_type", given(rope, "type", "default"))


def _read_scaling(kind: str, rope: Mapping[str, Any]) -> LinearScaling | Llama3Scaling:
    factor = number(rope, "factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_positions=integer(rope, "original_max_position_embeddings"),
    )
