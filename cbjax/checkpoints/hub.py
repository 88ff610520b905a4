"""Checkpoints of the Hugging Face Hub, for names that are no local path. Its local cache goes first."""

from __future__ import annotations

import re
from pathlib import Path

from cbjax.checkpoints.safetensors import missing_files

_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repo_id(source: str) -> bool:
    """Whether `source` reads as "org/name"."""
    return _REPO_ID.fullmatch(source) is not None and not source.endswith(".gguf")


def snapshot(repo_id: str) -> Path:
    """A folder with the repository's configuration, tokenizer and weights: the cached one if it is whole.

    Raises:
        RuntimeError: it is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo_id, allow_patterns=_PATTERNS, local_files_only=True))
        if (cached / "config.json").is_file() and not missing_files(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_PATTERNS))
    except Exception as error:  # which classes, the client's HTTP library decides
        raise RuntimeError(
            f"{repo_id!r} is no local path, and downloading it from the Hugging Face Hub failed with "
            f"{type(error).__name__}: {error}. Check the name, the network and, for a gated model, "
            "`hf auth login`; or give the path of a local folder."
        ) from error
