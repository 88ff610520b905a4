"""A loaded model as a Hugging Face folder, so that another library runs the same weights, dequantised ones too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cbjax.checkpoints import load
from cbjax.models import DecoderConfig
from cbjax.models.families import FAMILIES
from cbjax.models.params import Params, flatten

ARCHITECTURE = "LlamaForCausalLM"


def write_folder(folder: Path, config: DecoderConfig, params: Params) -> None:
    """Writes config.json and model.safetensors of a Llama, in the parameters' dtype.

    Raises:
      ValueError: the model is no plain Llama, so that the folder would be another model.
    """
    (family,) = (family for family in FAMILIES if family.hf_architecture == ARCHITECTURE)
    tensors = {}
    for path, values in flatten(params).items():
        rule = family.hf_names.rules["/".join("{i}" if isinstance(part, int) else part for part in path)]
        assert rule.transform is None, f"{rule.name} is not stored as it is served"
        layer = next((str(part) for part in path if isinstance(part, int)), "")
        tensors[rule.name.replace("{i}", layer)] = np.asarray(values)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=1))
    written = family.from_hf(json.loads((folder / "config.json").read_text()))
    if written != config:
        raise ValueError(f"only a plain Llama can be handed over; the model is {config} and would become {written}")


def _hf_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def folder_of(source: str, scratch: Path) -> Path:
    """`source` itself if it is a folder, else its weights in float32, written below `scratch`."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    checkpoint = load(source, dtype="float32", progress=True)
    write_folder(scratch, checkpoint.config, checkpoint.params)
    return scratch
