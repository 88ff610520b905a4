"""Microseconds of the host's work for a decode step, by phase, with programs that compute nothing.

The phases are the engine's own, as `lm.timeline()` shows them, of calls of `generate_batch`: all rows decode, prefix
caching is on and has filled the pool, so that a row that needs a block takes a cached one. Programs do nothing, but
take a real model's arguments (`benchmarks.stub_device`). "read" waits for the device and is left out. "in windows" is
the same total where a dispatch is a window of eight steps, as on accelerators unless one says otherwise, for each step.
"between" is what `generate_batch` does between two steps; "streaming" is what a manager does there for as many requests
with a handler each, which is told every token.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import report

if TYPE_CHECKING:
    from cbjax import CausalLM, ContinuousBatchingConfig, WorkloadHints

PHASES = ("schedule", "build", "dispatch", "account", "update")
LIMITS_US = {64: 300.0, 512: 1000.0}
TOTAL, WINDOWS, BETWEEN, STREAMING = "total", "in windows", "between", "streaming"
WINDOW = 8


def decode_steps(steps: np.ndarray, rows: int, window: int = 1) -> np.ndarray:
    """bool[steps], those in which every row decodes and nobody came or went; not the last, which nothing follows."""
    full = (steps["rows"] == rows) & (steps["prefill_tokens"] == 0) & (steps["ended"] == 0)
    full &= steps["window"] == window
    full[-1] = False
    return full


def host_seconds(steps: np.ndarray) -> dict[str, np.ndarray]:
    """f64[steps] of each phase, and of all of them."""
    phases = {phase: steps[f"{phase}_end"] - steps[f"{phase}_begin"] for phase in PHASES}
    return {**phases, TOTAL: np.sum(list(phases.values()), axis=0)}


def seconds_between(steps: np.ndarray) -> np.ndarray:
    """f64[steps], from each step's update to the next one's schedule; 0 after the last."""
    return np.append(steps["schedule_begin"][1:] - steps["update_end"][:-1], 0.0)


def waves(lm: CausalLM, config: ContinuousBatchingConfig, rows: int, new_tokens: int, repeats: int) -> np.ndarray:
    """The steps of some calls of `generate_batch`, after one that is not counted, with new prompts each."""
    from benchmarks.workload import prompts
    from cbjax import GenerationConfig

    asked = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, do_sample=False)
    inputs = prompts(rows * (repeats + 1), lm.vocab_size)
    lm.generate_batch(inputs[:rows], asked, config)
    with lm.timeline() as timeline:
        for repetition in range(1, repeats + 1):
            lm.generate_batch(inputs[repetition * rows : (repetition + 1) * rows], asked, config)
    return timeline.steps


def streamed(lm: CausalLM, config: ContinuousBatchingConfig, hints: WorkloadHints, rows: int) -> np.ndarray:
    """The steps of a manager with as many requests, each with a handler that does nothing."""
    from benchmarks.workload import prompts
    from cbjax import GenerationConfig

    asked = GenerationConfig(max_new_tokens=hints.max_generated_length, eos_token_id=-1, do_sample=False)
    manager = lm.init_continuous_batching(asked, config, hints)
    for ids in prompts(2 * rows, lm.vocab_size)[rows:]:  # before the start, so that all run together
        name = manager.add_request(ids, streaming=True)
        manager.register_result_handler(name, lambda output: None)
    with lm.timeline() as timeline:
        manager.start()
        manager.stop()
    return timeline.steps


def measure(rows: int, args: Namespace) -> dict[str, report.Figure]:
    """Figures of one number of rows."""
    from benchmarks.stub_device import stub_model, stub_session
    from cbjax import ContinuousBatchingConfig, WorkloadHints

    lm = stub_model()
    config = ContinuousBatchingConfig(
        block_size=16,
        num_blocks=rows * args.blocks_per_row,
        max_batch_tokens=2048,
        max_requests_per_batch=rows,
        decode_buckets=[max(rows, 2)],  # two programs, since only the largest steps are looked at
        mixed_buckets=[2048],
        use_async_batching=False,
        decode_window=1,
    )
    hints = WorkloadHints(max_prompt_length=127, max_generated_length=args.new_tokens, num_requests=rows)
    session = stub_session(lm, config, hints)
    steps = waves(lm, config, rows, args.new_tokens, args.repeats)
    windows = waves(lm, replace(config, decode_window=WINDOW), rows, args.new_tokens, args.repeats)
    told = streamed(lm, config, hints, rows)
    assert lm.session is session, "another session was made, whose programs are not the stub's"
    lm.close()

    full = decode_steps(steps, rows)
    seconds = {
        **host_seconds(steps[full]),
        WINDOWS: host_seconds(windows[decode_steps(windows, rows, WINDOW)])[TOTAL] / WINDOW,
        BETWEEN: seconds_between(steps)[full],
        STREAMING: seconds_between(told)[decode_steps(told, rows)],
    }
    return {figure_name(rows, part): report.spread((1e6 * values).tolist(), "us") for part, values in seconds.items()}


def figure_name(rows: int, part: str) -> str:
    return f"{rows} rows, {part}"


def table(figures: dict[str, report.Figure], rows: Sequence[int]) -> str:
    """Medians: a line for each number of rows, and the total's 99th percentile."""
    columns = (*PHASES, TOTAL, WINDOWS, BETWEEN, STREAMING)
    lines = [
        [
            *(str(count), *(f"{figures[figure_name(count, part)]['median']:.0f}" for part in columns)),
            f"{figures[figure_name(count, TOTAL)]['p99']:.0f}",
        ]
        for count in rows
    ]
    return report.table(["rows", *columns, "total, p99"], lines)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("host_time", __doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 512], help="default 16 64 256 512")
    options.add_argument("--new-tokens", type=int, default=256, help="of a request (default 256, --quick 16)")
    options.add_argument("--blocks-per-row", type=int, default=32, help="of 16 tokens, in the pool (default 32)")
    options.add_argument("--repeats", type=int, default=3, help="calls that count (default 3, --quick 1)")
    args = options.parse_args(argv)
    if args.quick:
        args.new_tokens, args.repeats = min(args.new_tokens, 16), 1
    figures: dict[str, report.Figure] = {}
    for rows in args.rows:
        figures |= measure(rows, args)
    limits = {
        name: report.limit(figures[name], bound)
        for rows, bound in LIMITS_US.items()
        if rows in args.rows
        for name in (figure_name(rows, TOTAL), figure_name(rows, WINDOWS))
    }
    every = report.figures_table(figures, ("median", "p99", "min", "max"))
    text = f"microseconds, medians\n{table(figures, args.rows)}\n\n{every}"
    report.finish("host_time", argv, args, figures, text=text, limits=limits)


if __name__ == "__main__":
    main()
