"""What every benchmark shares: options, the machine it ran on, medians with their spread, a table, one JSON form.

The JSON form, `document`'s result: `benchmark`, `command`, `machine`, `versions`, `settings` (every option), `figures`
(name -> `spread`), `limits` (name of a figure -> `limit`), which is empty where nothing is promised, and `notes`
(sentences: what was not as asked). A benchmark may add more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

VALUES_KEPT = 32
LIBRARIES = ("cbjax", "jax", "jaxlib", "flax", "numpy")

type Figure = dict[str, Any]


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has; `description` is the module's docstring."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(description or "").split("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    made.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; the figures mean little")
    return made


def add_model_options(options: argparse.ArgumentParser) -> None:
    """Which model, in which dtypes."""
    options.add_argument("--model", default="demo", help="as CausalLM.from_pretrained takes it (default demo)")
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="one after another (default both)",
    )


def spread(values: Sequence[float], unit: str) -> Figure:
    """Median, minimum, maximum, 99th percentile (nearest rank), and every value unless they are many."""
    ordered = sorted(values)
    return {
        "unit": unit,
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "count": len(ordered),
        "values": list(values) if len(ordered) <= VALUES_KEPT else [],
    }


def limit(figure: Figure, bound: float, *, at_least: bool = False) -> dict[str, Any]:
    """Whether a figure's median is at most (or at least) `bound`."""
    holds = figure["median"] >= bound if at_least else figure["median"] <= bound
    return {"rule": "at least" if at_least else "at most", "bound": bound, "holds": holds}


def machine() -> dict[str, Any]:
    """What a reader has to know to compare figures."""
    import jax

    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"device": jax.devices()[0].device_kind, "processor": model, "cores": len(_cores())}


def versions() -> dict[str, str]:
    """Python's and the libraries'."""
    return {"python": platform.python_version()} | {n: importlib.import_module(n).__version__ for n in LIBRARIES}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Holds this process and its children to `count` cores; jax must not have been imported before.

    Raises:
      ValueError: there are fewer cores.
    """
    cores = _cores()
    if count > len(cores):
        raise ValueError(f"--threads asks for {count} cores and there are {len(cores)}; lower it")
    if count == len(cores) or not hasattr(os, "sched_setaffinity"):
        yield
        return
    os.sched_setaffinity(0, cores[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; the first to the left, the others to the right."""
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))
    return "\n".join(lines)


def figures_table(figures: Mapping[str, Figure], columns: Sequence[str] = ("median", "min", "max")) -> str:
    """One line per figure."""
    rows = [[name, figure["unit"], *(_short(figure[key]) for key in columns)] for name, figure in figures.items()]
    return table(["figure", "unit", *columns], rows)


def _short(value: float) -> str:
    """Four significant digits, or all of those before the point."""
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 4)}f}"


def finish(
    name: str,
    argv: Sequence[str],
    args: argparse.Namespace,
    figures: Mapping[str, Figure],
    *,
    text: str | None = None,
    limits: Mapping[str, dict[str, Any]] | None = None,
    notes: Sequence[str] = (),
    peer_versions: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Prints the table with its conditions, and writes the JSON if asked.

    Args:
      text: the table; None: one line per figure.
      limits: by the name of a figure.
      notes: what was not as asked.
      peer_versions: of libraries that ran elsewhere.
      more: further entries of the JSON.
    """
    made = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *argv]),
        "machine": machine(),
        "versions": {**versions(), **(peer_versions or {})},
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "figures": dict(figures),
        "limits": dict(limits or {}),
        "notes": list(notes),
        **(more or {}),
    }
    print(text or figures_table(figures))
    for note in notes:
        print(note)
    for figure, rule in made["limits"].items():
        answer = "holds" if rule["holds"] else "DOES NOT HOLD"
        print(f"{answer}: {figure} {rule['rule']} {rule['bound']:g} {figures[figure]['unit']}")
    print()
    for conditions in (made["machine"], made["versions"]):
        print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    print(made["command"])
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n")
