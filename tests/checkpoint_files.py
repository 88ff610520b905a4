"""Small checkpoints that tests write: a tiny Llama as a Hugging Face folder and as a GGUF file."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import save_file

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 8


def hf_tensors(*, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of `HF_CONFIG` under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (48, 32), "model.norm.weight": (32,)}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (32,), f"{layer}.post_attention_layernorm.weight": (32,)}
        widths = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in widths.items()}
        widths = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in widths.items()}
    if not tied:
        shapes["lm_head.weight"] = (48, 32)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path,
    tensors: dict[str, np.ndarray],
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    num_shards: int | None = None,
) -> Path:
    """A Hugging Face folder; with `num_shards` the tensors are dealt into that many files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | (config or {})))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if num_shards is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        own = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(own, folder / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return GGUF_NAMES[name]
    _, _, layer, *middle, part = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(middle)]}.{part}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows, written one row at a time."""
    out = np.empty_like(rows)
    half = HEAD_DIM // 2
    for head in range(num_heads):
        for j in range(half):
            out[head * HEAD_DIM + 2 * j] = rows[head * HEAD_DIM + j]
            out[head * HEAD_DIM + 2 * j + 1] = rows[head * HEAD_DIM + half + j]
    return out


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file of `tensors` (Hugging Face names and row order); matrices are stored as `kind`.

    `metadata` holds str, int, float, bool and lists of these; `extra` are float32 tensors by GGUF name.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        _add_metadata(writer, key, value)
    for name, values in tensors.items():
        if ".q_proj." in name:
            values = permute(values, NUM_HEADS)
        if ".k_proj." in name:
            values = permute(values, NUM_KV_HEADS)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        elif kind == gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(gguf_name(name), values.astype(ml_dtypes.bfloat16).view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
