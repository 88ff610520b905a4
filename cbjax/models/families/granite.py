"""Granite 3.x: a Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families import gguf, hf
from cbjax.models.families.family import Family, GGUFForm, Shapes
from cbjax.models.families.names import GGUF_NAMES_PERMUTED, HF_NAMES
from cbjax.models.families.reading import number, unsupported


def _from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    return hf.read_decoder(
        config,
        **hf.read_biases(config),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        logits_divisor=number(config, "logits_scaling", 1.0),
    )


def _from_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    keys = gguf.own_keys(metadata)
    if not keys.get("rope.scaling.finetuned", True):
        raise unsupported("granite.rope.scaling.finetuned", False, ["true: all layers rotate"])
    # The converter leaves out what is 0, and llama.cpp takes 0 for "no multiplier".
    return gguf.read_decoder(
        metadata,
        shapes,
        rope_factors,
        embedding_multiplier=number(keys, "embedding_scale", 0.0) or 1.0,
        residual_multiplier=number(keys, "residual_scale", 0.0) or 1.0,
        attention_scale=number(keys, "attention.scale", 0.0) or None,
        logits_divisor=number(keys, "logit_scale", 0.0) or 1.0,
    )


GRANITE = Family(
    hf_architecture="GraniteForCausalLM",
    hf_model_type="granite",
    from_hf=_from_hf,
    hf_names=HF_NAMES,
    gguf=GGUFForm(architecture="granite", read=_from_gguf, names=GGUF_NAMES_PERMUTED),
)
