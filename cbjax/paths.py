"""Where cbjax keeps files between processes: the demo model and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$CBJAX_CACHE`, else `$XDG_CACHE_HOME/cbjax`, else `~/.cache/cbjax`."""
    if chosen := os.environ.get("CBJAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cbjax"
