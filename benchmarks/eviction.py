"""What each eviction policy finds in the prefix cache, and what its step costs, over workloads and pool sizes.

Traces run through the engine's own scheduler with simulated time (`cbjax.simulate`, an 8B model on an H100 by its data
sheet); a request generates at most 4 tokens, so that runs are short and nearly all of the pool is the cache's. Rows
named "alone" are a cache without a scheduler, see `benchmarks.eviction_model`; the clairvoyant one knows the future and
bounds what any policy can find. Microseconds of a step are those of `benchmarks.scheduler` with 256 rows.

Workloads: `--trace FILE` (JSON lines as `cbjax.simulate.read_trace` reads them, in blocks of 512 tokens), and three
models: sessions as in Mooncake's conversations, long sessions of agents, and few-shot evaluations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.eviction_model import PRIORITIES, chains, hits
from benchmarks.scheduler import PARTS
from benchmarks.scheduler import Simulation as Steps
from cbjax.scheduler import EVICTION_MAPPING
from cbjax.simulate import Trace, read_trace, simulate, simulation_config
from cbjax.simulate.few_shot import FEW_SHOT
from cbjax.simulate.sessions import AGENTS

MAX_NEW_TOKENS = 4
ROWS = 16
# Turns of a coding agent: a long system prompt, short messages and tool results, ten turns on average.
LONG_SESSIONS = replace(AGENTS, name="long sessions", system_tokens=4000, opening=AGENTS.message, continues=0.9)
STEP_ROWS, STEP_WAITING = 256, 1000
TURN = 20
FOUND, COMPUTED = "found", "computed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload.

    Attributes:
      trace: its requests, with short answers.
      block_size: tokens.
      pools: blocks.
    """

    trace: Trace
    block_size: int
    pools: tuple[int, ...]


def cases(path: Path | None, *, quick: bool) -> Iterator[Case]:
    """The workloads, with pools in which little is found at first and in the end most of what comes again."""
    count, questions = (20, 100) if quick else (1000, 1500)
    if path is not None:
        trace = read_trace(path)
        yield Case(trace=_short(trace.head(2 * count)), block_size=512, pools=(1500, 3000, 6000, 12_000))
    yield Case(trace=_short(AGENTS.sample(count, rate=3)), block_size=512, pools=(1500, 3000, 6000))
    yield Case(trace=_short(LONG_SESSIONS.sample(count, rate=3)), block_size=128, pools=(1000, 2000, 4000))
    yield Case(trace=_short(FEW_SHOT.sample(questions, rate=100)), block_size=16, pools=(1024, 2048, 3072))


def _short(trace: Trace) -> Trace:
    return replace(trace, output_tokens=np.minimum(trace.output_tokens, MAX_NEW_TOKENS))


def measure(case: Case, pool: int) -> dict[str, report.Figure]:
    """What is found and computed with each policy."""
    figures = {}
    for eviction in EVICTION_MAPPING:
        config = simulation_config(
            num_blocks=pool, block_size=case.block_size, eviction=eviction, max_requests_per_batch=ROWS
        )
        result = simulate(case.trace, config)
        figures[_name(case, pool, FOUND, eviction)] = report.spread([100 * result.hit_rate], "%")
        figures[_name(case, pool, COMPUTED, eviction)] = report.spread([result.computed_tokens / 1e3], "k tokens")
    return figures


def measure_alone(case: Case) -> dict[str, report.Figure]:
    """What is found by a cache without a scheduler."""
    requests, tokens = chains(case.trace, case.block_size), int(case.trace.prompt_tokens.sum())
    figures = {}
    for pool in case.pools:
        for policy, priority in PRIORITIES.items():
            found = hits(requests, pool, priority) * case.block_size
            figures[_name(case, pool, FOUND, f"{policy} alone")] = report.spread([100 * found / tokens], "%")
    return figures


def measure_steps(steps: int, num_blocks: int) -> dict[str, report.Figure]:
    """Microseconds of a step with each policy; they take turns."""
    simulations = {
        name: Steps(STEP_ROWS, STEP_WAITING, eviction=name, num_blocks=num_blocks) for name in EVICTION_MAPPING
    }
    for simulation in simulations.values():
        simulation.run(TURN, measure=False)
    for _ in range(steps // TURN):
        for simulation in simulations.values():
            simulation.run(TURN)
    figures = {}
    for name, simulation in simulations.items():
        times = zip(*(simulation.seconds[part] for part in PARTS), strict=True)
        figures[f"step, {name}"] = report.spread([1e6 * sum(parts) for parts in times], "us")
    return figures


def _name(case: Case, pool: int, what: str, policy: str) -> str:
    return f"{case.trace.name}, {pool:,} blocks of {case.block_size}, {what}, {policy}"


def comparison(figures: Mapping[str, report.Figure]) -> str:
    """One line per workload, pool and quantity; one column per policy."""
    lines: dict[str, dict[str, str]] = {}
    for name, figure in figures.items():
        line, _, policy = name.rpartition(", ")
        lines.setdefault(f"{line} ({figure['unit']})", {})[policy] = f"{figure['median']:,.1f}"
    policies = list(dict.fromkeys(policy for cells in lines.values() for policy in cells))
    rows = [[line, *(cells.get(policy, "") for policy in policies)] for line, cells in lines.items()]
    return report.table(["", *policies], rows)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("eviction", __doc__)
    options.add_argument("--trace", type=Path, metavar="FILE", help="a trace with block ids, before the models")
    options.add_argument("--steps", type=int, default=400, help="measured steps of each policy (default 400)")
    args = options.parse_args(argv)

    figures: dict[str, report.Figure] = {}
    for case in cases(args.trace, quick=args.quick):
        for pool in case.pools[:1] if args.quick else case.pools:
            figures |= measure(case, pool)
        figures |= measure_alone(case)
    figures |= measure_steps(2 * TURN, 4096) if args.quick else measure_steps(args.steps, 65_536)
    text = comparison(figures) + "\n\n" + report.figures_table(figures, ("median",))
    report.finish("eviction", argv, args, figures, text=text)


if __name__ == "__main__":
    main()
