"""Microseconds a step costs on the host: schedule, build and update, with no model and answers made up.

The pool has 65,536 blocks of 16 tokens. Prefix caching is on and every block is cached when it starts, with a chain of
tokens that no prompt begins with, so that each block that is taken has to be found, forgotten and registered anew.
`--no-sharing` measures without. As many requests run as there are rows, and whenever one ends another is
submitted, so that the number waiting stays as it is. Prompts have 16 to 127 tokens and 64 to 448 are generated for
each: in a step a sixteenth of the rows gains a block, and one to three rows end and are replaced. Submitting is not
counted. Numbers of waiting requests take turns, so that a drifting machine affects all alike.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks import report
from cbjax.descriptor import build
from cbjax.ladder import make_ladder
from cbjax.sampling import NUM_WORDS, SamplingParams
from cbjax.scheduler import (
    EVICTION_MAPPING,
    BlockPool,
    Request,
    SchedulerConfig,
    StepOutputs,
    add,
    eviction_named,
    initial_state,
    schedule,
    scheduler_named,
    update,
)
from cbjax.scheduler.pool import PoolDraft
from cbjax.scheduler.prefix import blake2b_128, root

PARTS = ("schedule", "build", "update")
LIMIT_US = 1000.0
LIMIT_AT = (256, 100_000)
FLAT = 1.1
TURN = 50


class Simulation:
    """A scheduler with `running` rows taken and `waiting` requests behind them.

    Attributes:
      seconds: by part, one value per step measured.
    """

    def __init__(
        self, running: int, waiting: int, *, shares: bool = True, eviction: str = "arc", num_blocks: int = 65_536
    ) -> None:
        self.config = SchedulerConfig(
            policy=scheduler_named("fifo"),
            num_blocks=num_blocks,
            block_size=16,
            max_batch_tokens=2048,
            max_requests_per_batch=running,
            max_blocks_per_request=64,
            safety_margin=0.15,
            num_words=NUM_WORDS,
            shares_blocks=shares,
            eviction=eviction_named(eviction),
        )
        self.ladder = make_ladder(max_batch_tokens=self.config.max_batch_tokens, max_rows=running)
        self.state = initial_state(self.config)
        if shares:
            self.state = replace(self.state, pool=all_cached(self.state.pool))
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self._uids = itertools.count()
        self._rng = np.random.default_rng(0)
        self._words = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9).pack()
        self._prompts = [self._rng.integers(0, 50_000, n, dtype=np.int32) for n in range(16, 128)]
        self._submit(running, shortest=1)  # so that they do not end together
        self._submit(waiting)

    def _submit(self, count: int, *, shortest: int = 64) -> None:
        lengths = self._rng.integers(shortest, 449, count).tolist()
        for length, prompt in zip(lengths, self._rng.integers(0, len(self._prompts), count).tolist(), strict=True):
            request = Request(
                uid=next(self._uids),
                prompt=self._prompts[prompt],
                max_new_tokens=length,
                eos_token_ids=(0,),
                words=self._words,
            )
            self.state = add(self.state, request)

    def run(self, steps: int, *, measure: bool = True) -> None:
        """Runs this many steps."""
        for _ in range(steps):
            times = self._step()
            if measure:
                for part, seconds in zip(PARTS, times, strict=True):
                    self.seconds[part].append(seconds)

    def _step(self) -> tuple[float, float, float]:
        start = time.perf_counter()
        plan, state = schedule(self.state)
        scheduled = time.perf_counter()
        build(plan.batch, self.ladder.select(plan.batch), self.config.max_requests_per_batch)
        built = time.perf_counter()
        rows = plan.batch.num_rows
        outputs = StepOutputs(
            tokens=self._rng.integers(1, 50_000, rows, dtype=np.int32),
            logprobs=np.zeros(rows, np.float32),
            finite=np.ones(rows, bool),
        )
        answered = time.perf_counter()
        self.state, results = update(state, plan, outputs)
        updated = time.perf_counter()
        self._submit(len(results.ended))
        return scheduled - start, built - scheduled, updated - answered


def all_cached(pool: BlockPool) -> BlockPool:
    """The pool with every blank block registered and given up, in chains of 64."""
    draft = PoolDraft(pool)
    blocks = draft.take(pool.num_blank)
    assert blocks is not None
    prefix = start = root(b"", 0, blake2b_128)
    for i, block in enumerate(blocks.tolist()):
        if i % 64 == 0:
            prefix = start
        prefix = prefix.extend(np.full(16, -1 - i, np.int32), blake2b_128)
        draft.register(block, 0, prefix)
    draft.drop(blocks)
    return draft.freeze()


def measure(
    running: int, waiting: Sequence[int], steps: int, warm_up: int, *, shares: bool, eviction: str = "arc"
) -> dict[str, report.Figure]:
    """Figures of one number of rows, by number waiting and part."""
    simulations = {count: Simulation(running, count, shares=shares, eviction=eviction) for count in waiting}
    for simulation in simulations.values():
        simulation.run(warm_up, measure=False)
    for _ in range(max(1, steps // TURN)):
        for simulation in simulations.values():
            simulation.run(min(TURN, steps))
    figures = {}
    for count, simulation in simulations.items():
        by_part = {part: [1e6 * s for s in seconds] for part, seconds in simulation.seconds.items()}
        by_part["total"] = [sum(parts) for parts in zip(*by_part.values(), strict=True)]
        for part, values in by_part.items():
            figures[figure_name(running, count, part)] = report.spread(values, "us")
    return figures


def figure_name(running: int, waiting: int, part: str) -> str:
    return f"{running:,} running, {waiting:,} waiting, {part}"


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("scheduler", __doc__)
    options.add_argument("--running", type=int, nargs="+", default=[64, 256, 512], help="rows (default 64 256 512)")
    options.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 100_000], help="default 0 1000 100000")
    options.add_argument("--steps", type=int, default=2000, help="measured steps of each (default 2000, --quick 100)")
    options.add_argument("--eviction", choices=EVICTION_MAPPING, default="arc", help="which cached blocks go first")
    options.add_argument("--no-sharing", action="store_true", help="without prefix caching")
    args = options.parse_args(argv)
    steps, warm_up = (100, 20) if args.quick else (args.steps, 300)

    figures: dict[str, report.Figure] = {}
    limits = {}
    for running in args.running:
        figures |= measure(running, args.waiting, steps, warm_up, shares=not args.no_sharing, eviction=args.eviction)
        totals = [figures[figure_name(running, waiting, "total")]["median"] for waiting in args.waiting]
        flat = f"{running:,} running, most against fewest waiting"
        figures[flat] = report.spread([totals[-1] / totals[0]], "ratio")
        limits[flat] = report.limit(figures[flat], FLAT)
    limited = figure_name(*LIMIT_AT, "total")
    if limited in figures:
        limits[limited] = report.limit(figures[limited], LIMIT_US)
    columns = ("median", "p99", "min", "max")
    report.finish("scheduler", argv, args, figures, text=report.figures_table(figures, columns), limits=limits)


if __name__ == "__main__":
    main()
