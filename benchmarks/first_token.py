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

from benchmarks.report import finish, parser, spread, table

PROMPT = "What is the capital of France?"


def first_text(cache: str, model: str) -> tuple[float, float]:
    """Seconds to the first byte of text, and to the end of the process."""
    environment = {**os.environ, "CBJAX_CACHE": cache}
    command = [sys.executable, "-m", "cbjax", "generate", "--model", model, "--max-new-tokens", "32", PROMPT]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_at = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first.strip():
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode} and printed {first!r} first")
    return first_at, time.perf_counter() - start


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3, help="cold and warm runs (default 3)")
    args = options.parse_args()

    from cbjax.checkpoints import demo

    model = str(demo.fetch(progress=True))
    runs: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                runs[kind].append(first_text(cache, model)[0])
    figures = {kind: spread(values) for kind, values in runs.items()}
    rows = [[kind, *(f"{f[key]:.1f}" for key in ("median", "min", "max"))] for kind, f in figures.items()]
    finish("first_token", args, table(["start", "median s", "min s", "max s"], rows), figures)


if __name__ == "__main__":
    main()
