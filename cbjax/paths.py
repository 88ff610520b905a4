"""Where cbjax keeps files between processes (the demo model, compiled programs), and how it writes those of others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path


def cache_dir() -> Path:
    """`$CBJAX_CACHE`, else `$XDG_CACHE_HOME/cbjax`, else `~/.cache/cbjax`."""
    if chosen := os.environ.get("CBJAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cbjax"


def check_writable(path: str | PathLike[str]) -> None:
    """Whether `write_whole` can make that file, as far as this can be known without making it.

    Raises:
      ValueError: it cannot; the text begins with the path.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{path}: that is a folder; name a file")
    if not folder.is_dir():
        raise ValueError(f"{path}: its folder does not exist; make it first")
    if not os.access(folder if _is_replaced(path) else path, os.W_OK):
        raise ValueError(f"{path}: it cannot be written there; choose another place")


def write_whole(path: str | PathLike[str], pieces: Iterable[str]) -> None:
    """Writes ASCII text to a file that is there when it is complete; an existing one is replaced then.

    Raises:
      OSError: it cannot be written; nothing is left behind, and an old file is as it was.
    """
    path = Path(path)
    if not _is_replaced(path):
        with path.open("w", encoding="ascii") as file:
            file.writelines(pieces)
        return
    if not path.absolute().parent.is_dir():  # else the error would name a file that nobody asked for
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; make it first", str(path))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="ascii") as file:
            file.writelines(pieces)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _is_replaced(path: Path) -> bool:
    """Pipes and devices are written to, not replaced."""
    return path.is_file() or not path.exists()
