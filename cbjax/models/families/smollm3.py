"""SmolLM3: a Llama in which some layers do not rotate ("NoPE"), and those may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families import gguf, hf
from cbjax.models.families.family import Family, GGUFForm, Shapes
from cbjax.models.families.names import GGUF_NAMES_PERMUTED, HF_NAMES
from cbjax.models.families.reading import integer, per_layer

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}
# Of every so many layers the last does not rotate. Fixed in llama.cpp, a default in transformers.
_INTERVAL = 4


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    config = {**_DEFAULTS, **config}
    num_layers = integer(config, "num_hidden_layers")
    # The list holds 1 for a layer that rotates, against its name.
    rotating = per_layer(config, "no_rope_layers", num_layers)
    if rotating is None:
        rotating = _rotating(num_layers, integer(config, "no_rope_layer_interval", _INTERVAL))
    rope_layers = tuple(bool(rotates) for rotates in rotating)
    windows = hf.read_windows(config, [not rotates for rotates in rope_layers])
    return hf.read_decoder(config, **hf.read_biases(config), rope_layers=rope_layers, windows=windows)


def _from_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    rope_layers = _rotating(integer(gguf.own_keys(metadata), "block_count"), _INTERVAL)
    return gguf.read_decoder(metadata, shapes, rope_factors, rope_layers=tuple(rope_layers))


def _rotating(num_layers: int, interval: int) -> list[bool]:
    if interval < 1:
        raise ValueError(f"'no_rope_layer_interval' in the model's configuration must be positive. Got {interval}.")
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


SMOLLM3 = Family(
    hf_architecture="SmolLM3ForCausalLM",
    hf_model_type="smollm3",
    from_hf=_from_hf,
    hf_names=HF_NAMES,
    gguf=GGUFForm(architecture="smollm3", read=_from_gguf, names=GGUF_NAMES_PERMUTED),
)
