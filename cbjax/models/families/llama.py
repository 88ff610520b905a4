"""Llama, and Mistral: a Llama whose layers may all have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families import gguf, hf
from cbjax.models.families.family import Family, GGUFForm, Shapes
from cbjax.models.families.names import GGUF_NAMES_PERMUTED, HF_NAMES
from cbjax.models.families.reading import integer


def _llama_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    return hf.read_decoder(config, **hf.read_biases(config))


def _mistral_from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
    config = {**defaults, **config}
    return hf.read_decoder(config, windows=_in_every_layer(config, "sliding_window", "num_hidden_layers"))


def _llama_from_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    # llama.cpp writes no window for Mistral models and computes them without one.
    windows = _in_every_layer(gguf.own_keys(metadata), "attention.sliding_window", "block_count")
    return gguf.read_decoder(metadata, shapes, rope_factors, windows=windows)


def _in_every_layer(config: Mapping[str, Any], window: str, layers: str) -> tuple[int, ...] | None:
    """The window of that key for as many layers as that key says; None if there is no window."""
    return (integer(config, window),) * integer(config, layers) if config.get(window) else None


LLAMA = Family(
    hf_architecture="LlamaForCausalLM",
    hf_model_type="llama",
    from_hf=_llama_from_hf,
    hf_names=HF_NAMES,
    gguf=GGUFForm(architecture="llama", read=_llama_from_gguf, names=GGUF_NAMES_PERMUTED),
)

MISTRAL = Family(
    hf_architecture="MistralForCausalLM",
    hf_model_type="mistral",
    from_hf=_mistral_from_hf,
    hf_names=HF_NAMES,
    gguf=None,
)
