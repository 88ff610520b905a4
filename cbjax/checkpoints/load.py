"""`load`: from a name to parameters, configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cbjax.checkpoints import demo, hub, safetensors
from cbjax.checkpoints.gguf import GGUFFile
from cbjax.checkpoints.mapping import load_params
from cbjax.checkpoints.source import TensorSource
from cbjax.models.config import DecoderConfig
from cbjax.models.families import NameTable, family_of_hf, form_of_gguf
from cbjax.models.params import Params, abstract_params, flatten
from cbjax.progress import progress as progress_bar
from cbjax.text import HFTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from cbjax.text.folder import read_json

_DTYPES: Mapping[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json asks for; None where it says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded model.

    Attributes:
        config: hyperparameters.
        params: nested dict of jax arrays, as `cbjax.models.abstract_params(config, dtype)` describes it.
        tokenizer: None if the checkpoint has none (a folder without tokenizer.json).
        generation: defaults for sampling.
        eos_token_ids: union of configuration, generation configuration and tokenizer, ascending.
        source: what was loaded, as it was named.
    """

    config: DecoderConfig
    params: Params
    tokenizer: HFTokenizer | None
    generation: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    source: str


def load(
    source: str | Path,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    token: str | bool | None = None,
    progress: bool = False,
) -> Checkpoint:
    """Loads a checkpoint.

    Args:
        source: "demo", a Hugging Face folder (config.json, safetensors), a .gguf file, or the "org/name" or
            "org/name/file.gguf" of a Hugging Face repository, which is downloaded unless the hub's cache has
            it. An existing path goes before a repository; a folder of yours named demo is "./demo".
        dtype: "float32" or "bfloat16".
        revision: of a repository: a branch, tag or commit; None: "main".
        token: for private and gated repositories; None: the saved one (`hf auth login`, HF_TOKEN), if any;
            False: none.
        progress: show progress bars.

    Raises:
        FileNotFoundError: no such file, folder, repository or revision, or a file of it is missing.
        ValueError: a damaged file, or a model that is not supported; the message says what is.
        PermissionError: a repository is gated, or the hub refuses the token.
        ConnectionError: the hub cannot be reached, and its cache does not have the repository.
        RuntimeError: the download of the demo model failed.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}. Got {dtype!r}.")
    path = _locate(source, revision, token, progress)
    loader = _load_folder if path.is_dir() else _load_gguf
    return loader(path, str(source), _DTYPES[dtype], progress)


def _locate(source: str | Path, revision: str | None, token: str | bool | None, progress: bool) -> Path:
    path = Path(source).expanduser()
    is_local = source == "demo" or path.exists()
    if is_local and revision is not None:
        raise ValueError(
            f"revision is of a repository on the hub, and {str(source)!r} is not one; got {revision!r}: leave it out."
        )
    if source == "demo":
        return demo.fetch(progress=progress)
    if is_local:
        return path
    if isinstance(source, str) and (name := hub.parse(source, revision)):
        return hub.fetch(name, token=token, progress=progress)
    raise FileNotFoundError(
        f"{str(source)!r} is neither a file nor a folder, nor 'demo', nor the 'org/name' or 'org/name/file.gguf' of "
        "a Hugging Face repository. Check the path."
    )


def _load_folder(folder: Path, source: str, dtype: np.dtype, progress: bool) -> Checkpoint:
    raw = read_json(folder / "config.json")
    if not raw:
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    with _well_formed(folder):
        family = family_of_hf(raw)
        config = family.from_hf(raw)
        generation = read_json(folder / "generation_config.json")
        tokenizer = tokenizer_from_folder(folder)
        eos_token_ids = _eos_union(raw.get("eos_token_id"), generation.get("eos_token_id"), tokenizer)
    weights = safetensors.open_folder(folder)
    return Checkpoint(
        config=config,
        params=_load_params(weights, family.hf_names, config, dtype, progress),
        tokenizer=tokenizer,
        generation=_generation_defaults(generation),
        eos_token_ids=eos_token_ids,
        source=source,
    )


@contextmanager
def _well_formed(folder: Path) -> Iterator[None]:
    """A value of an unexpected type anywhere in the folder's JSON is an error that names the folder."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} has a malformed config or tokenizer file ({reason}); download it again.") from error


def _load_gguf(path: Path, source: str, dtype: np.dtype, progress: bool) -> Checkpoint:
    file = GGUFFile(path)
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{path} is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`.")
    form = form_of_gguf(file.metadata)
    rope_factors = file.read("rope_freqs.weight") if "rope_freqs.weight" in file.shapes else None
    config = form.read(file.metadata, file.shapes, rope_factors)
    tokenizer = tokenizer_from_gguf(file.metadata)
    return Checkpoint(
        config=config,
        params=_load_params(file, form.names, config, dtype, progress),
        tokenizer=tokenizer,
        generation=GenerationDefaults(),
        eos_token_ids=_eos_union(None, None, tokenizer),
        source=source,
    )


def _load_params(
    source: TensorSource, names: NameTable, config: DecoderConfig, dtype: np.dtype, progress: bool
) -> Params:
    if config.num_layers > len(source.shapes):
        raise ValueError(
            f"The configuration names {config.num_layers} layers and the checkpoint has {len(source.shapes)} tensors."
        )
    total = sum(leaf.size * dtype.itemsize for leaf in flatten(abstract_params(config, dtype)).values())
    with progress_bar(show=progress, total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
        return load_params(source, names, config, dtype, on_tensor=bar.update)


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    names = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")
    return GenerationDefaults(**{name: generation.get(name) for name in names})


def _eos_union(model: Any, generation: Any, tokenizer: HFTokenizer | None) -> tuple[int, ...]:
    """Each of the two is an id, a list of ids or None; a negative id means none."""
    ids: set[int] = set(tokenizer.eos_token_ids if tokenizer else ())
    for given in (model, generation):
        ids.update(given if isinstance(given, Iterable) else () if given is None else (given,))
    return tuple(sorted(id for id in ids if id >= 0))
