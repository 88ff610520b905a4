"""The other side's process: made, started, asked one run at a time, and idle in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("transformers_peer.py")
REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Seconds of one call, the tokens generated for each prompt, and what a side can tell besides, by name."""

    seconds: float
    tokens: list[list[int]]
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class PeerError(RuntimeError):
    """The peer's process ended, or answered something else than it should."""


def set_up(folder: Path) -> Path:
    """Makes a virtual environment with the peer's libraries, unless it is there; returns its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True, stdout=sys.stderr)
    return python


class Peer:
    """One mode of a peer script, `SCRIPT` unless another is given, in a process that lives until `close`.

    Attributes:
      versions: of its libraries.
    """

    def __init__(self, python: Path, mode: str, job: Path, *, script: Path | None = None) -> None:
        self.mode = mode
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # The child imports nothing from here, so it gets none of this process's paths.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PYTHONSAFEPATH"] = "1"  # nor do modules beside the script stand for libraries of their names
        self._process = subprocess.Popen(
            [python, script or SCRIPT, mode, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise

    def run(self, count: int, new_tokens: int) -> Run:
        """Generates `new_tokens` for each of the job's first `count` prompts.

        Raises:
          PeerError: the process ended, or not every request got its tokens.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps({"count": count, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        run = Run(**self._answer())
        if [len(tokens) for tokens in run.tokens] != [new_tokens] * count:
            raise PeerError(f"{self.mode} generated {[*map(len, run.tokens)]} tokens for {count} x {new_tokens}")
        return run

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> PeerError:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")[-2000:]
        return PeerError(f"the peer ({self.mode}) ended with exit code {code}; it said: {said}")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
