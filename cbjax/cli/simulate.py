"""`cbjax simulate`: a trace, or requests drawn from a workload model, through the scheduler; no model, no device."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbjax.paths import check_writable, write_whole

if TYPE_CHECKING:
    from cbjax.simulate import Result, Sweep

EXAMPLE = "example: cbjax simulate chat --rate 20 --num-blocks 1024 2048 4096 --plot pools.png"


def add_parser(commands: Any, name: str) -> None:
    """Adds the command to those of `ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        name,
        help="size a KV pool: run requests through the scheduler alone",
        description="The engine's own scheduler over a trace, with a clock made of a cost model. Several values of "
        "--num-blocks, --margin or --eviction make a sweep: one line of the table for each combination.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE|MODEL", help="a .csv file with the columns prompt_tokens, output_tokens and, unless "
        "all come at once, arrival_s; a .jsonl file; or a workload model: chat, code, reasoning, agents, "
        "few_shot")  # fmt: skip
    add = parser.add_argument_group("requests").add_argument
    add("--requests", type=int, metavar="N", help="how many: drawn from a model (default 1000), the first of a trace "
        "(default all)")  # fmt: skip
    add("--rate", type=float, metavar="R", help="requests a second on average (default: as in the trace; those of a "
        "model all come at once)")  # fmt: skip
    add("--seed", type=int, default=0, help="of what is drawn (default 0)")
    add("--segment-size", type=int, metavar="TOKENS", help="tokens of a block id in a .jsonl file (default 512)")
    add = parser.add_argument_group("pool and scheduler").add_argument
    add("--num-blocks", type=int, nargs="+", required=True, metavar="N", help="blocks of the KV pool")
    add("--block-size", type=int, default=64, metavar="TOKENS", help="tokens of a KV block (default 64)")
    add("--margin", type=float, nargs="+", metavar="F", help="fraction of the pool that waiting requests may not take "
        "(default: the scheduler's own)")  # fmt: skip
    add("--offload", type=int, default=0, metavar="N", help="blocks of host memory for requests that lose theirs; "
        "default 0: these are computed again")  # fmt: skip
    add("--rows", type=int, metavar="N", help="requests of a step at most (default 512, with --cost as measured)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens of a step at most (default 8192, with --cost as "
        "measured)")  # fmt: skip
    add("--scheduler", choices=("fifo", "prefill_first"), default="fifo", help="scheduling policy (default fifo)")
    add("--eviction", nargs="+", metavar="NAME", help="which cached blocks go first, as eviction_policy of "
        "ContinuousBatchingConfig (default: as there)")  # fmt: skip
    add("--no-sharing", action="store_true", help="without the prefix cache")
    add = parser.add_argument_group("seconds of a step").add_argument
    add("--cost", type=Path, metavar="FILE", help="measured ones, as `cbjax.measure_cost(lm).to_json()` writes them")
    add("--hardware", choices=("a100", "h100", "tpu_v5e", "tpu_v6e"), help="without --cost: from this one's data sheet "
        "(default h100)")  # fmt: skip
    add("--parameters", type=float, metavar="BILLIONS", help="without --cost: of the model, in bfloat16 (default 8.03)")
    add("--kv-bytes", type=float, metavar="BYTES", help="without --cost: of a token's keys and values in all layers "
        "(default 131072, Llama 3.1 8B)")  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--processes", type=int, default=1, metavar="N", help="simulations of a sweep that run at a time (default 1)")
    add("--plot", type=Path, metavar="FILE", help="draw it; the name's ending says how: .png, .svg, .pdf, ...")
    add("--json", type=Path, metavar="FILE", help="write settings and results as JSON ('-': standard output)")


def run(args: argparse.Namespace) -> int:
    """Runs it; 1 if no pool of a sweep holds any request."""
    _check_outputs(args)

    from cbjax.cli.simulate_inputs import config_of, cost_of, measured_of, trace_of, varied
    from cbjax.simulate import run_sweep, simulate

    measured = measured_of(args)
    config = config_of(args, measured)
    trace, cost, vary = trace_of(args), cost_of(args, config, measured), varied(args)
    result: Result | Sweep
    if vary:
        result = run_sweep(trace, config, vary, cost=cost, processes=args.processes, progress_bar=True)
        is_empty = all(point.result is None for point in result.points)
    else:
        result, is_empty = simulate(trace, config, cost=cost, progress_bar=True), False
    to_stdout = str(args.json) == "-"
    print(result, file=sys.stderr if to_stdout else sys.stdout)
    if is_empty:
        raise ValueError("no request of the trace fits any of these pools; raise --num-blocks")
    if args.plot is not None:
        _plot(args.plot, result)
    if args.json is not None:
        _write_json(args, result)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises ValueError for what could only fail once everything has been simulated."""
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path is None or (option == "--json" and str(path) == "-"):
            continue
        try:
            check_writable(path)
        except ValueError as error:
            raise ValueError(f"{option} {error}") from None
    if args.plot is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install cbjax[plot]") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if args.plot.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"--plot {args.plot}: a picture's name ends with one of {', '.join(sorted(known))}")


def _plot(path: Path, result: Result | Sweep) -> None:
    from cbjax.simulate import Sweep, plot_result, plot_sweep

    figure = plot_sweep(result) if isinstance(result, Sweep) else plot_result(result)
    figure.savefig(path)
    print(f"\npicture: {path}", file=sys.stderr)


def _write_json(args: argparse.Namespace, result: Result | Sweep) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    text = json.dumps({"settings": settings, "simulated": json.loads(result.to_json())}, indent=1, allow_nan=False)
    if str(args.json) == "-":
        print(text)
    else:
        write_whole(args.json, [text, "\n"])
