"""A loaded model as a Hugging Face folder, so that another library runs the same weights, dequantised ones too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.hf_config import ARCHITECTURE, hf_config
from cbjax.checkpoints import load
from cbjax.models import DecoderConfig
from cbjax.models.families import FAMILIES
from cbjax.models.params import Params, flatten


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
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))
    written = family.from_hf(json.loads((folder / "config.json").read_text()))
    if written != config:
        raise ValueError(f"only a plain Llama can be handed over; the model is {config} and would become {written}")


def folder_of(source: str, scratch: Path) -> Path:
    """`source` itself if it is a folder, else its weights in float32, written below `scratch`."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    checkpoint = load(source, dtype="float32", progress=True)
    write_folder(scratch, checkpoint.config, checkpoint.params)
    return scratch
