"""Qwen2 and Qwen2.5 (biases of query, key and value), and Qwen3 (their heads normed instead).

In both some layers may have a sliding window: those from `max_window_layers` on, or as `layer_types` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families import gguf, hf
from cbjax.models.families.family import Family, GGUFForm, Shapes
from cbjax.models.families.names import GGUF_NAMES, HF_NAMES
from cbjax.models.families.reading import integer

_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _qwen2_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_DEFAULTS, **config}
    return hf.read_decoder(config, qkv_bias=True, windows=_windows(config))


def _qwen3_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_DEFAULTS, "head_dim": 128, **config}
    biases = hf.read_biases({"attention_bias": config.get("attention_bias")})
    return hf.read_decoder(config, qk_norm=True, windows=_windows(config), **biases)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    first = integer(config, "max_window_layers")
    return hf.read_windows(config, [layer >= first for layer in range(integer(config, "num_hidden_layers"))])


def _qwen2_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    return gguf.read_decoder(metadata, shapes, rope_factors, qkv_bias=True)


def _qwen3_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    return gguf.read_decoder(metadata, shapes, rope_factors, qk_norm=True)


QWEN2 = Family(
    hf_architecture="Qwen2ForCausalLM",
    hf_model_type="qwen2",
    from_hf=_qwen2_from_hf,
    hf_names=HF_NAMES,
    gguf=GGUFForm(architecture="qwen2", read=_qwen2_from_gguf, names=GGUF_NAMES),
)

QWEN3 = Family(
    hf_architecture="Qwen3ForCausalLM",
    hf_model_type="qwen3",
    from_hf=_qwen3_from_hf,
    hf_names=HF_NAMES,
    gguf=GGUFForm(architecture="qwen3", read=_qwen3_from_gguf, names=GGUF_NAMES),
)
