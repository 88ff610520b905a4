"""Seconds from starting a process to the first text of the demo model: without and with compiled programs on disk.

Every run is a new `cbjax generate` process, timed from its start to its first byte of standard output. *cold* starts
with an empty compilation cache, *warm* with the one that the cold run left. The model file is there beforehand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import report

PROMPT = "What is the capital of France?"


def first_text(cache: str, model: str) -> float:
    """Seconds to the first byte of text."""
    environment = {**os.environ, "CBJAX_CACHE": cache}
    command = [sys.executable, "-m", "cbjax", "generate", "--model", model, "--max-new-tokens", "32", PROMPT]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first.strip():
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode} and printed {first!r} first")
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("first_token", __doc__)
    options.add_argument("--model", default="demo", help="as `cbjax generate` takes it (default demo)")
    options.add_argument("--repeats", type=int, default=3, help="cold and warm runs (default 3, --quick 1)")
    args = options.parse_args(argv)

    from cbjax.checkpoints import demo

    model = str(demo.fetch(progress=True)) if args.model == "demo" else args.model
    runs: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(1 if args.quick else args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm"):
                runs[start].append(first_text(cache, model))
    figures = {start: report.spread(values, "s") for start, values in runs.items()}
    report.finish("first_token", argv, args, figures)


if __name__ == "__main__":
    main()
