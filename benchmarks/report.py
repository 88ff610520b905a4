"""What every benchmark shares: the machine it ran on, medians with their spread, a table, one JSON form."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    return made


def machine() -> dict[str, Any]:
    """What a reader has to know to compare figures."""
    import jax

    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum, maximum and every value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; the first to the left, the others to the right."""
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))
    return "\n".join(lines)


def finish(name: str, args: argparse.Namespace, text: str, figures: dict[str, Any]) -> None:
    """Prints the table with its conditions, and writes the JSON if asked."""
    conditions = machine()
    command = " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])
    print(text)
    print(f"\n{', '.join(f'{key} {value}' for key, value in conditions.items())}\n{command}")
    if args.json:
        document = {"benchmark": name, "command": command, "machine": conditions, "figures": figures}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
