"""GGUF files of Gemma 2 and Gemma 3: the same model as the folder's, and what llama.cpp adds by itself."""

from pathlib import Path
from typing import Any

import family_checkpoints as checkpoints
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from cbjax.checkpoints import load
from cbjax.models import DecoderConfig, RopeConfig
from cbjax.models.families import form_of_gguf

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
KEYS: dict[str, dict[str, int | float | str]] = {
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0},
    "gemma3": {
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 100.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    },
}


def gguf_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{TENSORS[module]}.{part}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{TENSORS[inner]}.{part}"


def small_norms(family: str) -> dict[str, np.ndarray]:
    """Tensors of bfloat16 values whose norms lie around 0, as in published models: 1 + w keeps all their bits."""
    tensors = checkpoints.tensors_of(family)
    tensors |= {name: (values - 4.0) / 2 for name, values in tensors.items() if "norm" in name}
    return {name: values.astype(jnp.bfloat16).astype(np.float32) for name, values in tensors.items()}


def write_gguf(path: Path, family: str) -> Path:
    config = checkpoints.config_of(family)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    for key, value in KEYS[family].items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{family}.{key}", value)
    for name, values in small_norms(family).items():
        writer.add_tensor(gguf_name(name), values + np.float32("norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gguf_and_folder_give_the_same_model(family, dtype, tmp_path):
    stored = load(write_gguf(tmp_path / "m.gguf", family), dtype=dtype)
    # llama.cpp scales scores by the width of a head.
    folder = checkpoints.write(family, tmp_path / "hf", {"query_pre_attn_scalar": 12})
    save_file(small_norms(family), folder / "model.safetensors", metadata={"format": "pt"})
    expected = load(folder, dtype=dtype)
    for name in DecoderConfig.__dataclass_fields__:
        got, wanted = getattr(stored.config, name), getattr(expected.config, name)
        assert got == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), name
    jax.tree.map(np.testing.assert_array_equal, stored.params, expected.params)


def read(architecture: str, blocks: int, **keys: Any) -> DecoderConfig:
    sizes = {"embedding_length": 64, "feed_forward_length": 48, "context_length": 64, "vocab_size": 96}
    sizes |= {"attention.head_count": 4, "attention.key_length": 12, "attention.layer_norm_rms_epsilon": 1e-6}
    named = sizes | {"block_count": blocks} | {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": named[key] for key in named}
    return form_of_gguf(metadata).read(metadata, {}, None)


def test_gguf_gemma2_without_its_own_keys_has_llama_cpps_values():
    config = read("gemma2", 4)
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_soft_cap, config.logits_soft_cap, config.local_rope) == (50.0, 30.0, None)


def test_gguf_gemma3_without_its_own_keys_has_llama_cpps_values():
    config = read("gemma3", 7, attention__sliding_window=16, rope__freq_base=1e6)
    assert config.windows == (16,) * 5 + (None, 16)
    assert (config.rope, config.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    assert (config.attention_soft_cap, config.logits_soft_cap, config.qk_norm) == (None, None, True)
    assert read("gemma3", 7).windows is None


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_gguf_the_largest_gemma_scales_scores_by_another_width(architecture, largest):
    assert read(architecture, largest).attention_scale == 16**-0.5
    assert read(architecture, largest - 1).attention_scale == 12**-0.5


def test_gguf_a_pattern_of_gemma_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"'attention.sliding_window_pattern' .* must be positive. Got 0"):
        read("gemma3", 7, attention__sliding_window_pattern=0)
