"""Requests through the scheduler alone: steps per second of a simulation, and its memory, which must not grow.

Chat requests that all come at once keep every row taken, so that a step is as large as it gets. Each step is the
engine's `schedule` and `update`, with prompts made and statistics kept; prefix caching is on, and every block of every
prompt is registered for it. Measured with one process on one core.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

from benchmarks import report
from cbjax.progress import progress
from cbjax.simulate import Result, Simulation, simulation_config, workload_named

MILLION_LIMIT_S = 600.0
FLAT = 1.1


def measure(simulation: Simulation, *, show: bool) -> tuple[dict[str, report.Figure], Result]:
    """Runs a whole simulation; its figures, and what it came to."""
    requests = len(simulation.trace) - simulation.refused
    early = None
    began, cpu_began = time.perf_counter(), time.process_time()
    with progress(show=show, total=requests, desc="simulating", unit="request") as bar:
        while not simulation.is_done:
            before = simulation.tally.ended
            simulation.step()
            bar.update(simulation.tally.ended - before)
            if early is None and simulation.tally.ended >= requests // 10:
                early = peak_mib()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    late = peak_mib()
    result = simulation.result()  # which sorts every request's times, so for a moment it takes more
    values = {
        "requests": (requests, "requests"),
        "steps": (result.num_steps, "steps"),
        "rows of a step": (result.generated_tokens / result.num_steps, "rows"),
        "a step": (1e6 * seconds / result.num_steps, "us"),
        "steps per second": (result.num_steps / seconds, "steps/s"),
        "the run": (seconds, "s"),
        "the run, processor time": (cpu_seconds, "s"),  # less where other processes took the core in between
        "a million requests at this speed": (1e6 * seconds / requests, "s"),
        "peak memory at 10%": (early or late, "MiB"),
        "peak memory at the end": (late, "MiB"),
        "memory at the end against at 10%": (late / (early or late), "ratio"),
    }
    return {name: report.spread([value], unit) for name, (value, unit) in values.items()}, result


def peak_mib() -> float:
    """Most memory this process has had resident at one time, so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("simulation", __doc__)
    options.add_argument("--requests", type=int, default=1_000_000, help="default 1000000, --quick 2000 at most")
    options.add_argument("--workload", default="chat", help="default chat")
    options.add_argument("--rate", type=float, help="requests a second (default: all come at once)")
    options.add_argument("--rows", type=int, default=1024, help="of a step at most (default 1024)")
    options.add_argument("--num-blocks", type=int, default=8192, help="default 8192")
    options.add_argument("--block-size", type=int, default=256, help="tokens (default 256)")
    options.add_argument("--max-batch-tokens", type=int, default=8192, help="of a step (default 8192)")
    args = options.parse_args(argv)

    requests = min(args.requests, 2000) if args.quick else args.requests
    trace = workload_named(args.workload).sample(requests, rate=args.rate)
    config = simulation_config(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.rows,
    )
    figures, result = measure(Simulation(trace, config), show=sys.stderr.isatty())
    bounds = {"a million requests at this speed": MILLION_LIMIT_S, "memory at the end against at 10%": FLAT}
    text = f"{result}\n\n{report.figures_table(figures, ['median'])}"
    limits = {name: report.limit(figures[name], bound) for name, bound in bounds.items()}
    report.finish("simulation", argv, args, figures, text=text, limits=limits)


if __name__ == "__main__":
    main()
