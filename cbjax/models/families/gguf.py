"""Reading GGUF metadata: what the architectures share. Keys are llama.cpp's, below the architecture's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cbjax.models.config import DecoderConfig
from cbjax.models.families.family import Shapes
from cbjax.models.families.reading import given, integer, number, unsupported
from cbjax.models.rope import inverse_frequencies
from cbjax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig


def own_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata below the architecture's name, without it."""
    prefix = f"{metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def read_decoder(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: np.ndarray | None, **own: Any
) -> DecoderConfig:
    """The fields that all architectures spell alike; `own` are the architecture's fields, and win.

    Raises ValueError for a setting that is not supported or of the wrong type.
    """
    keys = own_keys(metadata)
    if experts := keys.get("expert_count"):
        raise unsupported(f"{metadata['general.architecture']}.expert_count", experts, ["0"])
    if "windows" not in own and (window := keys.get("attention.sliding_window")):
        raise unsupported(f"{metadata['general.architecture']}.attention.sliding_window", window, ["none"])
    hidden_size, num_heads = integer(keys, "embedding_length"), integer(keys, "attention.head_count")
    head_dim = integer(keys, "attention.key_length", hidden_size // max(num_heads, 1))
    embedding = shapes.get("token_embd.weight")
    fields = {
        "vocab_size": embedding[0] if embedding else integer(keys, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": integer(keys, "feed_forward_length"),
        "num_layers": integer(keys, "block_count"),
        "num_heads": num_heads,
        "num_kv_heads": integer(keys, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": number(keys, "attention.layer_norm_rms_epsilon"),
        "rope": _read_rope(keys, head_dim, rope_factors),
        "max_positions": integer(keys, "context_length"),
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    return DecoderConfig(**(fields | own))


def _read_rope(keys: Mapping[str, Any], head_dim: int, rope_factors: np.ndarray | None) -> RopeConfig:
    theta = number(keys, "rope.freq_base", 10_000.0)
    if (rotated := given(keys, "rope.dimension_count", head_dim)) != head_dim:
        raise unsupported("rope.dimension_count", rotated, [f"{head_dim}, the whole head"])
    if rope_factors is not None:
        return RopeConfig(theta=theta, scaling=_llama3_from_factors(theta, head_dim, rope_factors))
    kind = given(keys, "rope.scaling.type", "none")
    factor = number(keys, "rope.scaling.factor", number(keys, "rope.scale_linear", 1.0))
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=LinearScaling(factor=factor))
    raise unsupported("rope.scaling.type", kind, ["none", "linear", "llama3's rope_freqs.weight"])


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
        raise unsupported("divisors in rope_freqs.weight", factors.tolist(), [rule])
    return scaling
