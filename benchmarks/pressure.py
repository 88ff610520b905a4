"""Generated tokens per second against the size of the KV pool, for cbjax and transformers' continuous batching.

A pool of 100% holds every request at its longest, 32 prompts of 16 to 127 random ids and 64 new tokens; smaller pools
evict. cbjax runs with a host-memory tier, which takes the KV of the evicted and gives it back, and without one, where
they are computed again (soft reset), which is also what transformers does: on a CPU it has no such tier. All have the
same number of blocks, each with its default safety margin. Sides of a pool take turns, and the first run of each is
not counted: cbjax compiles in it. Prefix sharing is off, since prompts repeat. Tokens are compared with those of the
largest pool. For the peer's environment, see `benchmarks.vs_transformers`.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import report
from benchmarks.peer import Peer, PeerError, Run
from benchmarks.sides import BATCHED, PEER_MODES, Job, Ours, Side, add_side_options, peer_python_of
from benchmarks.vs_transformers import agreement
from benchmarks.workload import prompts
from cbjax.scheduler import blocks_for

OFFLOAD, RESET = "cbjax with offload", "cbjax with soft reset"
UNITS = {"evictions": "requests", "recomputed tokens": "tokens", "copied MiB": "MiB"}
AGAINST, RECOMPUTED, EQUAL = f"against {BATCHED}", "recomputed, offload against soft reset", "equal to the largest pool"
# Of what soft resets compute again, what offloading may.
MOST_RECOMPUTED = 0.1


@dataclass(slots=True, kw_only=True)
class Report:
    """What has been measured so far; notes say what was not as asked."""

    figures: dict[str, report.Figure] = field(default_factory=dict)
    limits: dict[str, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peer_versions: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float], unit: str) -> None:
        self.figures[name] = report.spread(values, unit)

    def add_limited(self, name: str, values: Sequence[float], bound: float, *, at_least: bool) -> None:
        """A ratio that something is promised of."""
        self.add(name, values, "ratio")
        self.limits[name] = report.limit(self.figures[name], bound, at_least=at_least)


def pool_blocks(job: Job, new_tokens: int, percent: int) -> tuple[int, bool]:
    """Blocks of so many percent of what all requests need at their longest, and whether one request needs more.

    Then it is what that one needs.
    """
    needs = [blocks_for(len(prompt) + new_tokens, job.block_size) for prompt in job.prompts]
    asked, longest = blocks_for(sum(needs) * percent, 100), max(needs)
    return max(asked, longest), asked < longest


def take_turns(made: dict[str, Side], args: Namespace, label: str, notes: list[str]) -> dict[str, list[Run]]:
    """All runs of each side, the first ones too; a side that fails is dropped and noted."""
    runs: dict[str, list[Run]] = {name: [] for name in made}
    for _ in range(args.repeats + 1):
        for name in list(runs):
            try:
                runs[name].append(made[name].run(args.requests, args.new_tokens))
            except PeerError as error:
                notes.append(cannot_run(label, name, error))
                del runs[name]
    return runs


def cannot_run(label: str, name: str, error: PeerError) -> str:
    """One line; the last of a traceback says what happened."""
    return f"{label}, {name}: cannot run: {str(error).strip().splitlines()[-1]}"


def measure(
    args: Namespace, job: Job, label: str, peer_python: Path | None, scratch: Path, found: Report
) -> dict[str, list[Run]]:
    """Runs all sides with the job's pool."""
    with ExitStack() as stack:
        made: dict[str, Side] = {}
        for name, space in ((OFFLOAD, args.offload_space), (RESET, 0.0)):
            ours = Ours(job, cpu_offload_space=space)
            stack.callback(ours.close)
            made[name] = ours
        if peer_python is not None:
            try:
                peer = Peer(peer_python, PEER_MODES[BATCHED], job.write(scratch / "job.json"))
                stack.callback(peer.close)
                made[BATCHED], found.peer_versions = peer, peer.versions
            except PeerError as error:
                found.notes.append(cannot_run(label, BATCHED, error))
        return take_turns(made, args, label, found.notes)


def add_figures(found: Report, label: str, runs: Mapping[str, list[Run]], right: Sequence[Sequence[int]]) -> None:
    """Figures and limits of one pool; `right` are the tokens of the largest."""
    counted = {name: own[1:] for name, own in runs.items()}
    rates = {name: [run.tokens_per_second for run in own] for name, own in counted.items()}
    for name, own in counted.items():
        found.add(f"{label}, {name}", rates[name], "tokens/s")
        for count in own[0].counts:
            found.add(f"{label}, {name}, {count}", [run.counts[count] for run in own], UNITS[count])
        equal = min(agreement(run.tokens, right) for run in runs[name])
        found.add_limited(f"{label}, {name}, {EQUAL}", [equal], 1.0, at_least=True)
    for name in (OFFLOAD, RESET) if BATCHED in counted else ():
        ratios = [a / b for a, b in zip(rates[name], rates[BATCHED], strict=True)]
        found.add_limited(f"{label}, {name} {AGAINST}", ratios, 1.0, at_least=True)
    offload, reset = (sum(run.counts["recomputed tokens"] for run in counted[name]) for name in (OFFLOAD, RESET))
    if reset:
        found.add_limited(f"{label}, {RECOMPUTED}", [offload / reset], MOST_RECOMPUTED, at_least=False)


def parse(argv: Sequence[str]) -> Namespace:
    options = report.parser("pressure", __doc__)
    options.add_argument("--model", default="demo", help="as CausalLM.from_pretrained takes it (default demo)")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    add_side_options(options, block_size=16)
    options.add_argument("--requests", type=int, default=32, help="of a run (default 32)")
    options.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 127], help="least, most (default 16 127)")
    options.add_argument(
        "--pools", type=int, nargs="+", default=[100, 50, 25, 12], help="percent (default 100 50 25 12)"
    )
    options.add_argument("--offload-space", type=float, default=1.0, help="GiB of the host-memory tier (default 1)")
    args = options.parse_args(argv)
    if args.quick:
        args.requests, args.new_tokens, args.repeats, args.pools = 4, 32, 1, [12]
    args.pools = sorted(args.pools, reverse=True)
    return args


def run(args: Namespace, scratch: Path) -> Report:
    """Everything that was asked for."""
    from benchmarks.hf_folder import folder_of
    from cbjax.checkpoints import load

    folder = folder_of(args.model, scratch / "model")
    shortest, longest = args.prompt_tokens
    inputs = prompts(args.requests, load(folder).config.vocab_size, shortest=shortest, longest=longest)
    peer_python, found = peer_python_of(args), Report()
    job = Job(
        model=str(folder),
        dtype=args.dtype,
        threads=args.threads,
        prompts=inputs,
        block_size=args.block_size,
        max_batch_tokens=args.max_batch_tokens,
        num_blocks=0,
    )
    right: list[list[int]] = []
    for percent in args.pools:
        blocks, raised = pool_blocks(job, args.new_tokens, percent)
        label = f"{args.dtype}, {percent}% pool of {blocks} blocks"
        if raised:
            found.notes.append(f"{label}: raised to what the longest request needs")
        runs = measure(args, replace(job, num_blocks=blocks), label, peer_python, scratch, found)
        right = right or runs[OFFLOAD][0].tokens
        add_figures(found, label, runs, right)
    if args.dtype != "float32":  # where another bucket may round otherwise
        found.limits = {name: limit for name, limit in found.limits.items() if not name.endswith(EQUAL)}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    with report.threads(args.threads), tempfile.TemporaryDirectory() as scratch:
        found = run(args, Path(scratch))
        report.finish(
            "pressure",
            argv,
            args,
            found.figures,
            limits=found.limits,
            notes=found.notes,
            peer_versions=found.peer_versions,
        )


if __name__ == "__main__":
    main()
