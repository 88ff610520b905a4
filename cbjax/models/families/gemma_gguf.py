"""Gemma 2 and Gemma 3 in GGUF files. What llama.cpp knows of them without being told is filled in as it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families import gguf
from cbjax.models.families.family import GGUFForm, NameTable, Shapes, TensorRule
from cbjax.models.families.names import GGUF_NAMES
from cbjax.models.families.reading import integer, number
from cbjax.models.rope_config import RopeConfig

# Blocks of the two models, of each family the largest, whose scores are not scaled by their heads' width.
_GEMMA2_27B_BLOCKS, _GEMMA3_27B_BLOCKS = 46, 62


def _gemma2(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    keys = gguf.own_keys(metadata)
    return gguf.read_decoder(
        metadata,
        shapes,
        rope_factors,
        **_shared(keys, pattern=2, default_window=4096, largest=_GEMMA2_27B_BLOCKS),
        attention_soft_cap=number(keys, "attn_logit_softcapping", 50.0),
        logits_soft_cap=number(keys, "final_logit_softcapping", 30.0),
    )


def _gemma3(metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None) -> DecoderConfig:
    keys = gguf.own_keys(metadata)
    return gguf.read_decoder(
        metadata,
        shapes,
        rope_factors,
        **_shared(keys, pattern=6, default_window=0, largest=_GEMMA3_27B_BLOCKS),
        qk_norm=True,
        local_rope=RopeConfig(theta=number(keys, "rope.freq_base_swa", 10_000.0)),
        logits_soft_cap=number(keys, "final_logit_softcapping", 0.0) or None,
    )


def _shared(keys: Mapping[str, Any], *, pattern: int, default_window: int, largest: int) -> dict[str, Any]:
    """The fields of both. Of every `pattern` blocks the last sees the whole context; a window of 0 is none."""
    hidden_size, num_heads = integer(keys, "embedding_length"), integer(keys, "attention.head_count")
    num_layers = integer(keys, "block_count")
    head_dim = integer(keys, "attention.key_length", hidden_size // max(num_heads, 1))
    pattern = integer(keys, "attention.sliding_window_pattern", pattern)
    if pattern < 1:
        raise ValueError(f"'attention.sliding_window_pattern' in the model's metadata must be positive. Got {pattern}.")
    window = integer(keys, "attention.sliding_window", default_window)
    windows = tuple(window if (layer + 1) % pattern else None for layer in range(num_layers)) if window else None
    return {
        "norm_offset": 1.0,
        "wide_norms": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "windows": windows,
        "embedding_multiplier": hidden_size**0.5,
        "round_embedding_multiplier": True,
        "attention_scale": (hidden_size // max(num_heads, 1) if num_layers == largest else head_dim) ** -0.5,
    }


def _without_offset(values: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """llama.cpp stores 1 + weight, in float32: from bfloat16 weights nothing was lost, and nothing is here."""
    return values.astype(np.float32) - np.float32(config.norm_offset)


def _gemma_names() -> NameTable:
    rules = {
        **GGUF_NAMES.rules,
        "layers/{i}/attn_post_norm/weight": TensorRule(name="blk.{i}.post_attention_norm.weight"),
        "layers/{i}/mlp_post_norm/weight": TensorRule(name="blk.{i}.post_ffw_norm.weight"),
    }
    norms = {path: replace(rule, transform=_without_offset) for path, rule in rules.items() if "norm/" in path}
    return NameTable(rules={**rules, **norms}, ignored=GGUF_NAMES.ignored)


_NAMES = _gemma_names()

GEMMA2_GGUF = GGUFForm(architecture="gemma2", read=_gemma2, names=_NAMES)
GEMMA3_GGUF = GGUFForm(architecture="gemma3", read=_gemma3, names=_NAMES)
