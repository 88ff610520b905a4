"""Seconds from starting a process to the first token of the demo model: without and with compiled programs on disk.

*cold* starts with an empty cache folder, *warm* with what the cold start left there; the model file is there before.
Every start is a new process, timed from outside, and ends in one of two ways:

* one prompt: `cbjax generate` until its first byte of text, with the programs that this prompt reaches;
* every program: a process that compiles the whole plan (offload and forks included) and then generates a token. It also
  tells how long its parts took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import report

PROMPT = "What is the capital of France?"
RATIO_LIMIT, PROGRAMS_LIMIT = 0.4, 24
PARTS = ("imports", "weights", "programs", "first token")
# Prints a line when the first token is there: seconds of each part, and the number of programs.
CHILD = """
import json, sys, time
marks = [time.perf_counter()]
from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig
import jax
marks.append(time.perf_counter())
lm = CausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2])
marks.append(time.perf_counter())
config = ContinuousBatchingConfig(cpu_offload_space=0.25, max_batch_tokens=json.loads(sys.argv[3]))
plan = lm.compile_plan(config)
lm.session.warmup()
marks.append(time.perf_counter())
next(lm.stream([1, 2, 3], GenerationConfig(max_new_tokens=2, eos_token_id=-1), config))
marks.append(time.perf_counter())
seconds = [after - before for before, after in zip(marks, marks[1:])]
print(json.dumps({"seconds": seconds, "programs": len(plan), "on disk": plan.count("on disk")}), flush=True)
"""


def start(command: Sequence[str], cache: str, *, whole_line: bool) -> tuple[float, bytes]:
    """Seconds until a process has printed its first byte (or line), and that.

    Raises:
      RuntimeError: it fails, or prints nothing.
    """
    environment = {**os.environ, "CBJAX_CACHE": cache}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.readline() if whole_line else process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if process.returncode or not first.strip():
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode} and printed {first!r} first")
    return seconds, first


def first_text(cache: str, model: str, dtype: str) -> float:
    """Seconds to the first byte of text of `cbjax generate`."""
    options = ["--model", model, "--dtype", dtype, "--max-new-tokens", "32", PROMPT]
    return start([sys.executable, "-m", "cbjax", "generate", *options], cache, whole_line=False)[0]


def every_program(cache: str, model: str, dtype: str, max_batch_tokens: int | None) -> dict[str, float]:
    """Seconds of a start with every program, of its parts, and how many programs there are and were on disk."""
    command = [sys.executable, "-c", CHILD, model, dtype, json.dumps(max_batch_tokens)]
    seconds, line = start(command, cache, whole_line=True)
    told = json.loads(line)
    counts = {"programs": told["programs"], "found": told["on disk"]}
    return {"total": seconds, **{f"of it {n}": s for n, s in zip(PARTS, told["seconds"], strict=True)}, **counts}


def measure(args: argparse.Namespace, model: str, dtype: str) -> dict[str, report.Figure]:
    """Cold and warm starts in turns; figures by name."""
    values: dict[str, list[float]] = {}
    one_prompt, all_programs = args.only != "every-program", args.only != "one-prompt"
    for _ in range(1 if args.quick else args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm") * one_prompt:
                seconds = first_text(cache, model, dtype)
                values.setdefault(f"{dtype}, one prompt, {kind}", []).append(seconds)
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm") * all_programs:
                for name, value in every_program(cache, model, dtype, args.max_batch_tokens).items():
                    name = f"{dtype}, every program, {kind}" + (name != "total") * f", {name}"
                    values.setdefault(name, []).append(value)
    units = {"programs": "programs", "found": "programs"}
    figures = {name: report.spread(v, units.get(name.rpartition(", ")[2], "s")) for name, v in values.items()}
    for start_kind in ("one prompt", "every program"):
        cold, warm = (values.get(f"{dtype}, {start_kind}, {kind}", []) for kind in ("cold", "warm"))
        if cold:
            ratios = [w / c for c, w in zip(cold, warm, strict=True)]
            figures[f"{dtype}, {start_kind}, warm against cold"] = report.spread(ratios, "ratio")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("startup", __doc__)
    report.add_model_options(options)
    options.add_argument("--repeats", type=int, default=3, help="cold and warm starts (default 3, --quick 1)")
    options.add_argument("--only", choices=["one-prompt", "every-program"], help="one kind of start (default both)")
    options.add_argument("--max-batch-tokens", type=int, help="of the starts with every program (default: cbjax's own)")
    args = options.parse_args(argv)

    from cbjax.checkpoints import demo

    model = str(demo.fetch(progress=True)) if args.model == "demo" else args.model
    figures: dict[str, report.Figure] = {}
    for dtype in args.dtype:
        figures |= measure(args, model, dtype)
    limits = {
        name: report.limit(figure, RATIO_LIMIT if figure["unit"] == "ratio" else PROGRAMS_LIMIT)
        for name, figure in figures.items()
        if figure["unit"] == "ratio" or (name.endswith(", programs") and figure["unit"] == "programs")
    }
    report.finish("startup", argv, args, figures, limits=limits)


if __name__ == "__main__":
    main()
