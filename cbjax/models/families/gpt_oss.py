"""gpt-oss: attention sinks, every second layer with a window, a mixture of experts with biases, YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig, ExpertsConfig
from cbjax.models.families import hf
from cbjax.models.families.family import Family, NameTable, TensorRule
from cbjax.models.families.names import HF_NAMES
from cbjax.models.families.reading import integer, number, unsupported
from cbjax.models.rope_config import RopeConfig, YarnScaling

_DEFAULTS = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_DEFAULTS, **config}
    _refuse_mxfp4(config)
    if (activation := config.get("hidden_act")) not in (None, "silu", "swish"):
        raise unsupported("hidden_act", activation, ["silu"])
    return hf.read_decoder(
        config,
        **hf.read_biases({"attention_bias": config["attention_bias"]}),
        wide_norms=True,
        sinks=True,
        windows=hf.layer_windows(config, [layer % 2 == 0 for layer in range(integer(config, "num_hidden_layers"))]),
        rope=_read_rope(config),
        experts=ExpertsConfig(
            num_experts=integer(config, "num_local_experts"),
            per_token=integer(config, "num_experts_per_tok"),
            alpha=number(config, "swiglu_alpha"),
            limit=number(config, "swiglu_limit"),
        ),
    )


def _refuse_mxfp4(config: Mapping[str, Any]) -> None:
    if dict(config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        raise unsupported(
            "quantization_config",
            "mxfp4",
            [
                "none: float32, float16 or bfloat16 weights, as transformers saves them after loading with "
                "quantization_config=Mxfp4Config(dequantize=True)"
            ],
        )


def _read_rope(config: Mapping[str, Any]) -> RopeConfig:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_scaling": _DEFAULT_ROPE}
    rope = hf.rope_settings(config)
    if hf.rope_type(rope) != "yarn":
        return hf.read_rope(config)
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise unsupported(f"{key} of yarn", rope[key], ["null"])
    factor = number(rope, "factor")
    scaling = YarnScaling(
        factor=factor,
        original_max_positions=integer(rope, "original_max_position_embeddings"),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=number(rope, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
        truncate=bool(rope.get("truncate", True)),
    )
    return RopeConfig(theta=number(rope, "rope_theta"), scaling=scaling)


def _transposed(values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """[experts, in, out] -> [experts, out, in]."""
    return values.swapaxes(1, 2)


def _gate_then_up(values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """[experts, rows, ...] whose rows are gate and up by turns -> gate's rows, then up's."""
    return np.concatenate([values[:, ::2], values[:, 1::2]], axis=1)


def _transposed_gate_then_up(values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    return _gate_then_up(_transposed(values, config), config)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1])


_MLP, _EXPERTS = "layers/{i}/mlp", "model.layers.{i}.mlp.experts"

GPT_OSS = Family(
    hf_architecture="GptOssForCausalLM",
    hf_model_type="gpt_oss",
    from_hf=_from_hf,
    hf_names=NameTable(
        rules={
            **HF_NAMES.rules,
            f"{_MLP}/router/weight": TensorRule(name="model.layers.{i}.mlp.router.weight"),
            f"{_MLP}/router/bias": TensorRule(name="model.layers.{i}.mlp.router.bias"),
            f"{_MLP}/gate_up/weight": TensorRule(
                name=f"{_EXPERTS}.gate_up_proj", transform=_transposed_gate_then_up, stored_shape=_swapped
            ),
            f"{_MLP}/gate_up/bias": TensorRule(name=f"{_EXPERTS}.gate_up_proj_bias", transform=_gate_then_up),
            f"{_MLP}/down/weight": TensorRule(
                name=f"{_EXPERTS}.down_proj", transform=_transposed, stored_shape=_swapped
            ),
            f"{_MLP}/down/bias": TensorRule(name=f"{_EXPERTS}.down_proj_bias"),
        },
        ignored=HF_NAMES.ignored,
    ),
    gguf=None,
)
