"""Executables on disk, found without tracing: what a second start would else spend most of its time on.

jax's own cache is keyed by the traced program, so each start traces every program again. Here the key is what a trace
depends on: the model's description, the source text of cbjax, the versions of the libraries, jax's settings, the
device, and the shapes of the arguments. So only models whose code is cbjax's own have a store; a module of one's own
may be other code under the same name, and is traced. An entry that cannot be read is dropped and compiled anew.

Only what was compiled in this process is kept: an executable that jax read from its cache does not survive being
written a second time (on a CPU it loads, and lacks functions when it runs).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import threading
import zlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

log = logging.getLogger(__name__)

_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
# Environment variables that change what a compiler makes of a program.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# An entry is some megabytes: the oldest go when there are more.
_MAX_ENTRIES = 256


class _CacheHits(threading.local):
    count = 0


_hits = _CacheHits()


def _note(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count += 1


jax.monitoring.register_event_listener(_note)


def cache_hits() -> int:
    """Executables that jax has read from its own cache on this thread."""
    return _hits.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram:
    """What is known of a program on disk.

    Attributes:
      seconds: spent on tracing and compiling it when it was made.
      temp_bytes: temporaries by the compiler's own analysis.
      path: its file.
    """

    seconds: float
    temp_bytes: int
    path: Path


class ProgramStore:
    """The entries of one model; any number of processes may use them at a time."""

    def __init__(self, folder: Path, model: str) -> None:
        """model: describes it so completely that equal descriptions are traced alike."""
        self.folder, self.model = folder, model

    def path(self, name: str, arguments: Any) -> Path:
        """Where the program of that name is kept, for arguments of these shapes (a pytree)."""
        leaves, structure = jax.tree.flatten(arguments)
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        key = repr((name, self.model, _surroundings(), str(structure), shapes))
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.program"

    def find(self, path: Path) -> StoredProgram | None:
        """What is known of an entry; None: there is none."""
        try:
            with path.open("rb") as file:
                header = json.loads(file.readline())
            return StoredProgram(seconds=header["seconds"], temp_bytes=header["temp_bytes"], path=path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _drop(path, error)
            return None

    def load(self, stored: StoredProgram) -> jax.stages.Compiled | None:
        """The executable of an entry; None: it cannot be read, and is gone."""
        try:
            with stored.path.open("rb") as file:
                file.readline()
                parts = pickle.loads(zlib.decompress(file.read()))
            os.utime(stored.path)
            return serialize_executable.deserialize_and_load(*parts)
        except Exception as error:  # whatever a damaged or foreign file makes pickle or the runtime raise
            _drop(stored.path, error)
            return None

    def save(self, path: Path, executable: jax.stages.Compiled, *, seconds: float, temp_bytes: int) -> None:
        """Writes an entry; what cannot be written is logged and missed by the next start only."""
        try:
            payload = zlib.compress(pickle.dumps(serialize_executable.serialize(executable)), level=1)
        except Exception as error:  # backends differ in what they raise
            log.warning("a program cannot be kept between processes: %s", error)
            return
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(json.dumps({"seconds": seconds, "temp_bytes": temp_bytes}).encode() + b"\n")
                file.write(payload)
            part.replace(path)
            self._prune()
        except OSError as error:
            log.warning("a program cannot be kept between processes: %s", error)
        finally:
            part.unlink(missing_ok=True)

    def _prune(self) -> None:
        entries = list(self.folder.glob("*.program"))
        if len(entries) > _MAX_ENTRIES:
            for path in sorted(entries, key=lambda path: path.stat().st_mtime)[: len(entries) - _MAX_ENTRIES]:
                path.unlink(missing_ok=True)


def _drop(path: Path, error: Exception) -> None:
    log.warning("a program on disk cannot be read and is compiled anew: %s (%s)", path, error)
    path.unlink(missing_ok=True)


def _surroundings() -> tuple[object, ...]:
    """All that a compiled program depends on beside the model and the shapes."""
    device = jax.devices()[0]
    # Where caches are is no part of a program; a setting that changes nothing else costs a compilation.
    known = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    # An attribute has what a context manager of this thread says, too; few settings have none.
    settings = sorted((name, repr(getattr(jax.config, name, value))) for name, value in known.items())
    variables = [os.environ.get(name) for name in _VARIABLES]
    return (*_process(), device.platform, device.device_kind, device.client.platform_version, settings, variables)


@functools.cache
def _process() -> tuple[object, ...]:
    """What stays the same as long as the process lives."""
    versions = [platform.python_version(), *(version(name) for name in _LIBRARIES)]
    return (_source_digest(), *versions, platform.machine(), _processor())


def _source_digest() -> str:
    """Of the text of every module that a trace can run through."""
    import cbjax
    import pallas_kernels

    digest = hashlib.sha256()
    for package in (cbjax, pallas_kernels):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """The instructions that the processor has: a program for one that has more would not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
