"""Checkpoints of the Hugging Face Hub. Its local cache goes first: what is whole there needs no network.

Only files that are read are downloaded: configuration, tokenizer, chat template, and the weights as safetensors or
one GGUF file. Weights come last, so that an interrupted download never passes for a whole checkpoint.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cbjax.checkpoints.hub_errors import cannot_be_read, hub_errors
from cbjax.checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, missing_files
from cbjax.progress import bar_class

log = logging.getLogger(__name__)

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX_NAME,
)
_REPO_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """What is asked of the hub.

    Attributes:
        repo_id: "org/name".
        gguf: path of a GGUF file in it; None: the checkpoint with config.json and safetensors.
        revision: branch, tag or commit; None: "main".
    """

    repo_id: str
    gguf: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        path = self.repo_id if self.gguf is None else f"{self.repo_id}/{self.gguf}"
        return repr(path) if self.revision is None else f"{path!r} (revision {self.revision!r})"


def parse(source: str, revision: str | None = None) -> HubName | None:
    """Reads "org/name" or "org/name/path/to/file.gguf"; None if it is neither."""
    parts = source.split("/")
    repo_id, gguf = "/".join(parts[:2]), "/".join(parts[2:])
    if not _REPO_ID.fullmatch(repo_id) or repo_id.endswith(".gguf"):
        return None
    if gguf and (not gguf.endswith(".gguf") or not all(part.strip(".") for part in parts)):
        return None
    return HubName(repo_id=repo_id, gguf=gguf or None, revision=revision)


def fetch(name: HubName, *, token: str | bool | None = None, progress: bool = False) -> Path:
    """The folder or GGUF file of `name` in the hub's cache, downloaded where the cache lacks it.

    A branch that is in the cache is taken as it is, without asking whether the hub has a newer one.

    Args:
        token: a token for private and gated repositories; None: the saved one, if any; False: none.
        progress: show progress bars while downloading.

    Raises:
        FileNotFoundError: no such repository, revision or file, or none that can be read here.
        PermissionError: the repository is gated or the token is refused.
        ConnectionError: the hub cannot be reached, or offline mode is on, and the cache does not have it.
        OSError: the cache cannot be written.
    """
    from huggingface_hub.utils import validate_repo_id

    with hub_errors(name, token):
        validate_repo_id(name.repo_id)
    cached = _Cached(name)
    if cached.path is not None and cached.is_whole:
        return cached.path
    try:
        return _Remote(name, token, progress).download()
    except ConnectionError as error:
        if cached.path is None:
            raise
        log.warning("%s has no tokenizer in the cache, and none could be looked for: %s", name, error)
        return cached.path


class _Cached:
    """What the cache has of a name.

    Attributes:
        path: of the folder or file; None: the cache has nothing that could be loaded.
        is_whole: nothing is missing, and whether there is a tokenizer is known.
    """

    def __init__(self, name: HubName) -> None:
        self.path: Path | None = None
        self.is_whole = False
        first = self._find(name, name.gguf or "config.json")
        if isinstance(first, str) and name.gguf is not None:
            self.path, self.is_whole = Path(first), True
        elif isinstance(first, str) and not missing_files(folder := Path(first).parent):
            self.path = folder
            # Another program may have left weights alone.
            self.is_whole = self._find(name, "tokenizer.json") is not None

    @staticmethod
    def _find(name: HubName, file: str) -> object:
        """The path as str; another object if the cache knows that there is no such file; None if it knows nothing."""
        from huggingface_hub import try_to_load_from_cache

        return try_to_load_from_cache(name.repo_id, file, revision=name.revision)


class _Remote:
    """A repository of the hub. Every method raises as `fetch` says."""

    def __init__(self, name: HubName, token: str | bool | None, progress: bool) -> None:
        self.name, self.token, self.progress = name, token, progress

    def download(self) -> Path:
        files = self._list_files()
        if self.name.gguf is not None:
            if self.name.gguf not in files:
                raise cannot_be_read(self.name, files)
            return self._get([self.name.gguf], show=self.progress) / self.name.gguf
        if "config.json" not in files or not files & {SINGLE_NAME, INDEX_NAME}:
            raise cannot_be_read(self.name, files)
        small = [file for file in _SMALL_FILES if file in files and not (file == INDEX_NAME and SINGLE_NAME in files)]
        folder = self._get(small, show=False)
        weights = [SINGLE_NAME] if SINGLE_NAME in files else missing_files(folder)
        if absent := [file for file in weights if file not in files]:
            raise FileNotFoundError(
                f"{self.name} of the hub lacks {', '.join(absent)}, which its {INDEX_NAME} names. Choose another "
                "revision, or tell the repository's owner."
            )
        # The small ones again: of one commit with the weights, should the branch have moved.
        return self._get([*small, *weights], show=self.progress)

    def _list_files(self) -> frozenset[str]:
        from huggingface_hub import HfApi, constants

        with hub_errors(self.name, self.token):
            info = HfApi().model_info(
                self.name.repo_id,
                revision=self.name.revision,
                token=self.token,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            return frozenset(sibling.rfilename for sibling in info.siblings or ())

    def _get(self, files: Iterable[str], *, show: bool) -> Path:
        """The snapshot's folder with these files."""
        from huggingface_hub import snapshot_download

        with hub_errors(self.name, self.token):
            folder = Path(
                snapshot_download(
                    self.name.repo_id,
                    revision=self.name.revision,
                    token=self.token,
                    allow_patterns=[glob.escape(file) for file in files],
                    tqdm_class=bar_class(show=show),
                )
            )
            # Where the hub falls silent half-way, the library can answer with a folder that is not whole.
            if absent := [file for file in files if not (folder / PurePosixPath(file)).is_file()]:
                raise ConnectionError(f"{', '.join(absent)} did not arrive")
        return folder
