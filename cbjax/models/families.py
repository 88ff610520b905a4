"""Model families as table entries: how a checkpoint's configuration and tensor names become ours.

A family is one `Family` value: the names it is known by, two functions that read a configuration, and two
name tables. Adding one means adding its entry to `FAMILIES`; nothing else branches on a model's name.

A name table maps a parameter path, with "{i}" for the layer, to the tensor's name in the file and a transform
of its values. Transforms keep the shape, so that all shapes are checked before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig, LinearScaling, Llama3Scaling, RopeConfig
from cbjax.models.rope import inverse_frequencies

type Transform = Callable[[np.ndarray, DecoderConfig], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """The tensor `name` ("{i}" is the layer) holds a parameter, after `transform`."""

    name: str
    transform: Transform | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredTensor:
    """A tensor that checkpoints carry and the model does not need.

    Attributes:
        name: as in `TensorRule`.
        reason: why it may be left out.
        tied_only: it is ignored in models with tied embeddings only.
    """

    name: str
    reason: str
    tied_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Parameter path ("layers/{i}/attn/q/weight") -> rule, and the tensors to leave out."""

    rules: Mapping[str, TensorRule]
    ignored: tuple[IgnoredTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        hf_architecture: the entry of `architectures` in config.json.
        hf_model_type: `model_type` in config.json, used where `architectures` is absent.
        gguf_architecture: `general.architecture` of a GGUF file.
        from_hf: config.json -> DecoderConfig.
        from_gguf: (metadata, {tensor name: shape}, values of rope_freqs.weight or None) -> DecoderConfig.
        hf_names, gguf_names: the two name tables.
    """

    hf_architecture: str
    hf_model_type: str
    gguf_architecture: str
    from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    from_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], np.ndarray | None], DecoderConfig]
    hf_names: NameTable
    gguf_names: NameTable


def family_of_hf(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for an architecture that is not in the table."""
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if family.hf_architecture in architectures:
            return family
        if not architectures and config.get("model_type") == family.hf_model_type:
            return family
    got = architectures or config.get("model_type")
    raise _unsupported("architecture", got, [family.hf_architecture for family in FAMILIES])


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF file. Raises ValueError for an architecture that is not in the table."""
    architecture = metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    supported = [family.gguf_architecture for family in FAMILIES]
    raise _unsupported("GGUF general.architecture", architecture, supported)


# Reading config.json.


def _llama_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method")
        raise _unsupported("quantization_config", method, ["none: float32, float16 or bfloat16 weights"])
    if (activation := _given(config, "hidden_act", "silu")) not in ("silu", "swish"):
        raise _unsupported("hidden_act", activation, ["silu"])
    hidden_size, num_heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=_integer(config, "head_dim", hidden_size // max(num_heads, 1)),
        rms_norm_eps=float(_given(config, "rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(config),
        max_positions=_integer(config, "max_position_embeddings", 2048),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    rope = {
        **{key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")},
        **dict(config.get("rope_parameters") or config.get("rope_scaling") or {}),
    }
    theta = float(_given(rope, "rope_theta", 10_000.0))
    if (fraction := _given(rope, "partial_rotary_factor", 1.0)) != 1.0:
        raise _unsupported("partial_rotary_factor", fraction, ["1.0"])
    kind = _given(rope, "rope_type", _given(rope, "type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=LinearScaling(factor=float(_given(rope, "factor"))))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(_given(rope, "factor")),
            low_freq_factor=float(_given(rope, "low_freq_factor")),
            high_freq_factor=float(_given(rope, "high_freq_factor")),
            original_max_positions=_integer(rope, "original_max_position_embeddings"),
        )
        return RopeConfig(theta=theta, scaling=scaling)
    raise _unsupported("rope scaling type", kind, ["default", "linear", "llama3"])


# Reading GGUF metadata.


def _llama_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> DecoderConfig:
    own = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    if experts := own.get("expert_count"):
        raise _unsupported("llama.expert_count", experts, ["0"])
    hidden_size, num_heads = _integer(own, "embedding_length"), _integer(own, "attention.head_count")
    head_dim = _integer(own, "attention.key_length", hidden_size // max(num_heads, 1))
    embedding = shapes.get("token_embd.weight")
    return DecoderConfig(
        vocab_size=embedding[0] if embedding else _integer(own, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(own, "feed_forward_length"),
        num_layers=_integer(own, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer(own, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(_given(own, "attention.layer_norm_rms_epsilon")),
        rope=_rope_from_gguf(own, head_dim, rope_factors),
        max_positions=_integer(own, "context_length"),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )


def _rope_from_gguf(own: Mapping[str, Any], head_dim: int, rope_factors: np.ndarray | None) -> RopeConfig:
    theta = float(_given(own, "rope.freq_base", 10_000.0))
    if (rotated := _given(own, "rope.dimension_count", head_dim)) != head_dim:
        raise _unsupported("rope.dimension_count", rotated, [f"{head_dim}, the whole head"])
    if rope_factors is not None:
        return RopeConfig(theta=theta, scaling=_llama3_from_factors(theta, head_dim, rope_factors))
    kind = _given(own, "rope.scaling.type", "none")
    factor = float(_given(own, "rope.scaling.factor", _given(own, "rope.scale_linear", 1.0)))
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=LinearScaling(factor=factor))
    raise _unsupported("rope.scaling.type", kind, ["none", "linear", "llama3's rope_freqs.weight"])


def _llama3_from_factors(theta: float, head_dim: int, factors: np.ndarray) -> Llama3Scaling:
    """The scaling whose divisors of the frequencies are `factors` f32[head_dim / 2].

    GGUF keeps the divisors and not the rule. Every published Llama 3.x has the same rule up to `factor`,
    which is the largest divisor, so it is rebuilt and then checked against all of them.
    """
    scaling = Llama3Scaling(
        factor=float(factors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    scaled = inverse_frequencies(RopeConfig(theta=theta, scaling=scaling), head_dim)
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
        rule = "those of Llama 3.x: 8192 original positions, frequency factors 1 and 4"
        raise _unsupported("divisors in rope_freqs.weight", factors.tolist(), [rule])
    return scaling


def _unpermute(num_heads: Callable[[DecoderConfig], int]) -> Transform:
    """Undoes llama.cpp's reordering of query and key rows.

    Its rope pairs neighbours (2j, 2j + 1); ours, like transformers', pairs halves (j, j + head_dim / 2).
    """

    def transform(rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
        heads = num_heads(config)
        pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return transform


_unpermute_q = _unpermute(lambda config: config.num_heads)
_unpermute_k = _unpermute(lambda config: config.num_kv_heads)


def _linear(path: str, name: str, transform: Transform | None = None) -> dict[str, TensorRule]:
    """Rules for the weight and the bias of one projection."""
    return {f"{path}/{part}": TensorRule(name=f"{name}.{part}", transform=transform) for part in ("weight", "bias")}


_LLAMA_HF_NAMES = NameTable(
    rules={
        "embed/weight": TensorRule(name="model.embed_tokens.weight"),
        "layers/{i}/attn_norm/weight": TensorRule(name="model.layers.{i}.input_layernorm.weight"),
        **_linear("layers/{i}/attn/q", "model.layers.{i}.self_attn.q_proj"),
        **_linear("layers/{i}/attn/k", "model.layers.{i}.self_attn.k_proj"),
        **_linear("layers/{i}/attn/v", "model.layers.{i}.self_attn.v_proj"),
        **_linear("layers/{i}/attn/o", "model.layers.{i}.self_attn.o_proj"),
        "layers/{i}/mlp_norm/weight": TensorRule(name="model.layers.{i}.post_attention_layernorm.weight"),
        **_linear("layers/{i}/mlp/gate", "model.layers.{i}.mlp.gate_proj"),
        **_linear("layers/{i}/mlp/up", "model.layers.{i}.mlp.up_proj"),
        **_linear("layers/{i}/mlp/down", "model.layers.{i}.mlp.down_proj"),
        "norm/weight": TensorRule(name="model.norm.weight"),
        "head/weight": TensorRule(name="lm_head.weight"),
    },
    ignored=(
        IgnoredTensor(name="lm_head.weight", reason="a copy of the embeddings", tied_only=True),
        IgnoredTensor(name="model.layers.{i}.self_attn.rotary_emb.inv_freq", reason="computed from rope_theta"),
    ),
)

_LLAMA_GGUF_NAMES = NameTable(
    rules={
        "embed/weight": TensorRule(name="token_embd.weight"),
        "layers/{i}/attn_norm/weight": TensorRule(name="blk.{i}.attn_norm.weight"),
        **_linear("layers/{i}/attn/q", "blk.{i}.attn_q", _unpermute_q),
        **_linear("layers/{i}/attn/k", "blk.{i}.attn_k", _unpermute_k),
        **_linear("layers/{i}/attn/v", "blk.{i}.attn_v"),
        **_linear("layers/{i}/attn/o", "blk.{i}.attn_output"),
        "layers/{i}/mlp_norm/weight": TensorRule(name="blk.{i}.ffn_norm.weight"),
        **_linear("layers/{i}/mlp/gate", "blk.{i}.ffn_gate"),
        **_linear("layers/{i}/mlp/up", "blk.{i}.ffn_up"),
        **_linear("layers/{i}/mlp/down", "blk.{i}.ffn_down"),
        "norm/weight": TensorRule(name="output_norm.weight"),
        "head/weight": TensorRule(name="output.weight"),
    },
    ignored=(
        IgnoredTensor(name="rope_freqs.weight", reason="read into the configuration"),
        IgnoredTensor(name="blk.{i}.attn_rot_embd", reason="computed from rope.freq_base"),
    ),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        hf_architecture="LlamaForCausalLM",
        hf_model_type="llama",
        gguf_architecture="llama",
        from_hf=_llama_from_hf,
        from_gguf=_llama_from_gguf,
        hf_names=_LLAMA_HF_NAMES,
        gguf_names=_LLAMA_GGUF_NAMES,
    ),
)


def _given(mapping: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of `key`, else (also for null) `default`. Raises ValueError if there is neither."""
    value = mapping.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"The model's configuration must have {key!r}. It has {', '.join(sorted(mapping))}.")
    return value


def _integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _given(mapping, key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} in the model's configuration must be an integer. Got {value!r}.")
    return value


def _unsupported(what: str, got: Any, supported: list[str]) -> ValueError:
    return ValueError(f"Unsupported {what}: {got!r}. Supported: {', '.join(supported)}.")
