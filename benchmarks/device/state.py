"""What a part of the check has found, kept in a file after every step, so that a process which hangs loses nothing.

The file is JSON: `steps` (name -> `status`, `seconds`, and what the step gave: `figures`, `limits`, `values`, or
`error`), `notes`, `machine` and `versions`. A status is "ok", "failed", "left out" or "running".
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report

ERROR_CHARACTERS = 1500


class LeftOutError(RuntimeError):
    """A step cannot be done here; its message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a step gives.

    Attributes:
      figures: by name.
      limits: by the name of a figure.
      values: facts that are no figures, or that later steps go by.
      notes: sentences.
    """

    figures: Mapping[str, report.Figure] = field(default_factory=dict)
    limits: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to find out.

    Attributes:
      name: within its part.
      run: of the state so far.
      seconds: that it may take, its compiling included, or from one `so_far` to the next; then its process is ended,
        and the next step has a new one.
    """

    name: str
    run: Callable[[State], Found]
    seconds: float = 40.0


class State:
    """The file and what is in it; what another process has left there is gone on with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"steps": {}, "notes": []}
        if path.exists():
            self.data = json.loads(path.read_text())

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        return self.data["steps"]

    def value(self, step: str, name: str) -> Any:
        """What an earlier step found.

        Raises:
          LeftOutError: it did not.
        """
        values = self.steps.get(step, {}).get("values", {})
        if name not in values:
            raise LeftOutError(f"needs what {step!r} finds, which is not there")
        return values[name]

    def run(self, step: Step) -> bool:
        """Runs a step and keeps what comes of it; False: it failed."""
        self.steps[step.name] = {"status": "running", "limit": step.seconds}
        self.save()
        start = time.perf_counter()
        try:
            found = step.run(self)
        except LeftOutError as error:
            self.end(step.name, "left out", start, error=str(error))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.end(step.name, "failed", start, error=said[:ERROR_CHARACTERS])
            return False
        else:
            self.data["notes"] += [note for note in found.notes if note not in self.data["notes"]]
            given = {"figures": dict(found.figures), "limits": dict(found.limits), "values": dict(found.values)}
            self.end(step.name, "ok", start, **given)
        return True

    def end(self, name: str, status: str, start: float, **more: Any) -> None:
        """Writes how a step ended that began at `start` of `time.perf_counter`."""
        kept = {key: value for key, value in self.steps[name].items() if key in ("figures", "limits", "values")}
        self.steps[name] = {"status": status, "seconds": round(time.perf_counter() - start, 3), **kept, **more}
        self.save()

    def so_far(self, name: str, found: Found) -> None:
        """Keeps what a running step has found already, in case that it comes to no end; its time begins anew."""
        self.steps[name] |= {"figures": dict(found.figures), "values": dict(found.values)}
        self.save()

    def leave_out(self, name: str, why: str) -> None:
        self.steps[name] = {"status": "left out", "seconds": 0.0, "error": why}
        self.save()

    def save(self) -> None:
        """Replaces the file as a whole: who reads it meanwhile finds the old one or the new one."""
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.data))
        os.replace(beside, self.path)
