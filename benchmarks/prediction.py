"""A run predicted by simulation, and then measured: every batch must be the same, and the time close.

Requests of ragged lengths, all submitted at once, in a pool so small that some lose their blocks; EOS ends nobody, so
that the lengths are known beforehand. For each kind of pressure (KV computed again, and KV kept in host memory) some
runs are made, of other requests each. The first serves to fit the cost of a step; the others are predicted with it.
Each begins with an empty pool. A predicted time is compared with the seconds from the first submission to the last
answer, warm-up not counted.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import report

if TYPE_CHECKING:
    from cbjax import CausalLM, ContinuousBatchingConfig
    from cbjax.ladder import Ladder
    from cbjax.scheduler import Batch, SchedulerConfig
    from cbjax.simulate import LinearCost, MeasuredStep, Trace

RESET, OFFLOAD = "soft reset", "offload"
DIFFER, OFF_BY = "batches that differ", "time, off by"
MOST_OFF = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What the engine did with a trace.

    Attributes:
      scheduler, ladder: that it ran with.
      batches: of its steps, with uids from 0.
      steps: as measured.
      seconds: of the whole run.
      evictions: requests that lost their blocks.
    """

    scheduler: SchedulerConfig
    ladder: Ladder
    batches: list[Batch]
    steps: list[MeasuredStep]
    seconds: float
    evictions: int


def ragged(count: int, *, prompt: Sequence[int], output: Sequence[int], seed: int) -> Trace:
    """`count` requests that come at once; `prompt` and `output` are the least and the most tokens."""
    from cbjax.simulate import make_trace

    rng = np.random.default_rng(seed)
    prompts, outputs = (rng.integers(least, most + 1, count) for least, most in (prompt, output))
    # Segments with ids of their own, so that no prompt begins like one of another run.
    segments = [[(seed * count + i, int(tokens))] for i, tokens in enumerate(prompts)]
    return make_trace(np.zeros(count), prompts, outputs, segments=segments, name="ragged")


def run_engine(lm: CausalLM, trace: Trace, config: ContinuousBatchingConfig) -> EngineRun:
    """The trace through an engine whose pool is empty, as it is when a recording begins."""
    from cbjax import GenerationConfig, measure_steps

    prompts = [trace.prompt(i, lm.vocab_size).tolist() for i in range(len(trace))]
    lengths = trace.output_tokens.tolist()
    asked = [GenerationConfig(max_new_tokens=n, eos_token_id=-1, do_sample=False) for n in lengths]
    with (
        tempfile.TemporaryDirectory() as folder,
        lm.record_to(Path(folder) / "run.cbjax"),
        lm.recording() as records,
        measure_steps(lm) as steps,
    ):
        lm.generate_batch(prompts, asked, config)
    assert lm.summary is not None
    assert lm.session is not None
    resolved = lm.session.resolved
    return EngineRun(
        scheduler=resolved.scheduler,
        ladder=resolved.ladder,
        batches=_renumbered([record.plan.batch for record in records]),
        steps=steps,
        seconds=lm.summary.seconds,
        evictions=lm.summary.soft_resets + lm.summary.offloads,
    )


def _renumbered(batches: Sequence[Batch]) -> list[Batch]:
    """With the run's first request as number 0: an engine goes on counting from run to run."""
    first = min(int(batch.uid.min()) for batch in batches)
    return [replace(batch, uid=batch.uid - first) for batch in batches]


def predict(trace: Trace, run: EngineRun, cost: LinearCost) -> tuple[list[Batch], float]:
    """Batches and seconds of the same trace in a simulation."""
    from cbjax.simulate import Simulation

    simulation = Simulation(trace, run.scheduler, cost=cost, ladder=run.ladder)
    batches = []
    while not simulation.is_done:
        batches.append(simulation.step().batch)
    return batches, simulation.clock


def num_different(predicted: Sequence[Batch], measured: Sequence[Batch]) -> int:
    """Steps whose batches differ in who computes which tokens in which place, or that only one side has.

    Ids and sampler settings are left out: a simulation has no model to draw tokens from.
    """
    pairs = zip(predicted, measured, strict=False)
    unequal = sum(replace(p, tokens=m.tokens, words=m.words) != m for p, m in pairs)
    return unequal + abs(len(predicted) - len(measured))


def measure(lm: CausalLM, args: Namespace, kind: str) -> dict[str, report.Figure]:
    """Figures of one kind of pressure."""
    from cbjax import ContinuousBatchingConfig
    from cbjax.simulate import fit_cost

    config = ContinuousBatchingConfig(
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.requests,
        safety_margin=args.margin,
        use_async_batching=False,  # a simulation reads each step's answers before the next
        cpu_offload_space=args.offload_space if kind == OFFLOAD else 0.0,
    )
    traces = [
        ragged(args.requests, prompt=args.prompt_tokens, output=args.new_tokens, seed=seed)
        for seed in range(args.runs + 1)
    ]
    cost = fit_cost(run_engine(lm, traces[0], config).steps)
    found: dict[str, list[float]] = {}
    for trace in traces[1:]:
        run = run_engine(lm, trace, config)
        batches, seconds = predict(trace, run, cost)
        values = {
            "steps, measured": len(run.batches),
            "steps, predicted": len(batches),
            DIFFER: num_different(batches, run.batches),
            "evictions": run.evictions,
            "time, measured": run.seconds,
            "time, predicted": seconds,
            OFF_BY: abs(seconds / run.seconds - 1),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {f"{kind}, {name}": report.spread(values, _unit(name)) for name, values in found.items()}


def _unit(name: str) -> str:
    if name.startswith("time"):
        return "ratio" if name == OFF_BY else "s"
    return "requests" if name == "evictions" else "steps"


def limits_of(figures: dict[str, report.Figure]) -> dict[str, dict]:
    """What is promised, of the worst run and not of the median one."""
    return {
        name: {"rule": "at most", "bound": bound, "holds": figure["max"] <= bound}
        for name, figure in figures.items()
        for what, bound in ((DIFFER, 0), (OFF_BY, MOST_OFF))
        if name.endswith(what)
    }


def parse(argv: Sequence[str]) -> Namespace:
    options = report.parser("prediction", __doc__)
    options.add_argument("--model", default="demo", help="as CausalLM.from_pretrained takes it (default demo)")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    options.add_argument("--requests", type=int, default=32, help="of a run (default 32)")
    options.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 127], help="least, most (default 16 127)")
    options.add_argument("--new-tokens", type=int, nargs=2, default=[16, 64], help="least, most (default 16 64)")
    options.add_argument("--num-blocks", type=int, default=48, help="of the pool (default 48)")
    options.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (default 16)")
    options.add_argument("--max-batch-tokens", type=int, default=256, help="token budget of a step (default 256)")
    options.add_argument("--margin", type=float, default=0.0, help="safety margin (default 0: most evictions)")
    options.add_argument("--offload-space", type=float, default=1.0, help="GiB of the host-memory tier (default 1)")
    options.add_argument("--runs", type=int, default=2, help="that are predicted, of each kind (default 2)")
    args = options.parse_args(argv)
    if args.quick:
        args.requests, args.runs, args.num_blocks = 8, 1, 16
        args.prompt_tokens, args.new_tokens = [8, 40], [8, 60]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)

    from cbjax import CausalLM

    lm = CausalLM.from_pretrained(args.model, dtype=args.dtype, progress_bar=True)
    figures: dict[str, report.Figure] = {}
    for kind in (RESET, OFFLOAD):
        figures |= measure(lm, args, kind)
    lm.close()
    report.finish("prediction", argv, args, figures, limits=limits_of(figures))


if __name__ == "__main__":
    main()
