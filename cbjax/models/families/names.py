"""Tensor names. Families of the Llama kind share them; only llama.cpp's order of query and key rows differs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families.family import IgnoredTensor, NameTable, TensorRule, Transform


def _linear(path: str, name: str, transform: Transform | None = None) -> dict[str, TensorRule]:
    """Rules for the weight and the bias of one projection."""
    return {f"{path}/{part}": TensorRule(name=f"{name}.{part}", transform=transform) for part in ("weight", "bias")}


HF_NAMES = NameTable(
    rules={
        "embed/weight": TensorRule(name="model.embed_tokens.weight"),
        "layers/{i}/attn_norm/weight": TensorRule(name="model.layers.{i}.input_layernorm.weight"),
        **_linear("layers/{i}/attn/q", "model.layers.{i}.self_attn.q_proj"),
        **_linear("layers/{i}/attn/k", "model.layers.{i}.self_attn.k_proj"),
        **_linear("layers/{i}/attn/v", "model.layers.{i}.self_attn.v_proj"),
        **_linear("layers/{i}/attn/o", "model.layers.{i}.self_attn.o_proj"),
        "layers/{i}/attn/q_norm/weight": TensorRule(name="model.layers.{i}.self_attn.q_norm.weight"),
        "layers/{i}/attn/k_norm/weight": TensorRule(name="model.layers.{i}.self_attn.k_norm.weight"),
        "layers/{i}/attn/sinks": TensorRule(name="model.layers.{i}.self_attn.sinks"),
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


def _gguf_names(q_transform: Transform | None = None, k_transform: Transform | None = None) -> NameTable:
    return NameTable(
        rules={
            "embed/weight": TensorRule(name="token_embd.weight"),
            "layers/{i}/attn_norm/weight": TensorRule(name="blk.{i}.attn_norm.weight"),
            **_linear("layers/{i}/attn/q", "blk.{i}.attn_q", q_transform),
            **_linear("layers/{i}/attn/k", "blk.{i}.attn_k", k_transform),
            **_linear("layers/{i}/attn/v", "blk.{i}.attn_v"),
            **_linear("layers/{i}/attn/o", "blk.{i}.attn_output"),
            "layers/{i}/attn/q_norm/weight": TensorRule(name="blk.{i}.attn_q_norm.weight"),
            "layers/{i}/attn/k_norm/weight": TensorRule(name="blk.{i}.attn_k_norm.weight"),
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


def _unpermute(num_heads: Callable[[DecoderConfig], int]) -> Transform:
    """Undoes llama.cpp's reordering of query and key rows.

    Its first rope pairs neighbours (2j, 2j + 1); ours, like transformers', pairs halves (j, j + head_dim / 2).
    """

    def transform(rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
        heads = num_heads(config)
        pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return transform


# Architectures whose converter derives from llama.cpp's LlamaModel have permuted rows; the others' rope pairs halves.
GGUF_NAMES_PERMUTED = _gguf_names(
    _unpermute(lambda config: config.num_heads), _unpermute(lambda config: config.num_kv_heads)
)
GGUF_NAMES = _gguf_names()
