"""Compiled programs kept on disk between processes: a second start mostly reads them back."""

from __future__ import annotations

import logging
from pathlib import Path

from cbjax.paths import cache_dir

log = logging.getLogger(__name__)

# Seconds from which jax keeps a program. One of a small model compiles in about a second; tracing again is all that a
# second start should pay.
SHORTEST_COMPILE = 0.2


def enable_compilation_cache() -> str:
    """Turns jax's persistent cache on, unless the user has set one up or turned it off.

    Returns:
      What is in force, for the report.
    """
    import jax

    if not jax.config.jax_enable_compilation_cache:
        return "off: jax_enable_compilation_cache is False"
    path = cache_dir() / "xla"
    if jax.config.jax_compilation_cache_dir not in (None, str(path)):
        return f"the one already set up, {jax.config.jax_compilation_cache_dir}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("programs are not kept between processes: %s (set CBJAX_CACHE to a folder of yours)", error)
        return f"off: {path} cannot be made ({error.strerror})"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_COMPILE)
    return str(path)


def program_folder() -> Path | None:
    """Where executables are kept beside jax's cache; None where that is off or somebody else's."""
    import jax

    is_ours = jax.config.jax_compilation_cache_dir == str(cache_dir() / "xla")
    return cache_dir() / "programs" if is_ours and jax.config.jax_enable_compilation_cache else None
