"""Generated tokens per second of cbjax, of transformers' continuous batching and of padded `generate`, on the CPU.

All three run the same weights and the same prompts, 16 to 127 random ids each, and generate 64 tokens for each,
greedily, whatever EOS is. They take turns in every repetition; each keeps its process, and idles while another runs.
A call is timed from its start to its return. Its first run at a size is not counted: cbjax compiles in it. Prefix
sharing is off, since prompts repeat.

The peer needs an environment of its own: `--setup-peer DIR` makes one there with pip (torch 2.13.0, transformers
5.24.0), `--peer-python PATH` names one that exists, `--only cbjax` does without. llama.cpp takes part if it is asked
to: `--setup-llama-cpp DIR` builds it, `--llama-cpp DIR` names its programs (see `benchmarks.llama_cpp`).
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import llama_cpp, report
from benchmarks.peer import Run
from benchmarks.sides import BATCHED, OURS, Job, Side, add_side_options, peer_python_of, sides
from benchmarks.workload import prompts

SHORTEST, LONGEST = 16, 127
# What cbjax has to reach, as a multiple of transformers' continuous batching, by dtype and requests.
AT_LEAST = {("float32", 16): 5.0, ("float32", 64): 5.0, ("bfloat16", 16): 3.0, ("bfloat16", 64): 4.0}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of requests whose tokens are all equal."""
    return sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def measure(made: dict[str, Side], dtype: str, count: int, new_tokens: int, repeats: int) -> dict[str, report.Figure]:
    """Figures of one dtype and number of requests."""
    label = f"{dtype}, {count} requests"
    runs: dict[str, list[Run]] = {name: [] for name in made}
    for _ in range(repeats + 1):
        for name, side in made.items():
            runs[name].append(side.run(count, new_tokens))
    rates = {name: [run.tokens_per_second for run in own[1:]] for name, own in runs.items()}
    figures = {f"{label}, {name}": report.spread(own, "tokens/s") for name, own in rates.items()}
    for name in made:
        if name != OURS:
            ratios = [a / b for a, b in zip(rates[OURS], rates[name], strict=True)]
            figures[f"{label}, cbjax against {name}"] = report.spread(ratios, "ratio")
        if name not in (OURS, llama_cpp.NAME):  # which tells no tokens
            same = agreement(runs[OURS][-1].tokens, runs[name][-1].tokens)
            figures[f"{label}, requests equal to {name}"] = report.spread([same], "ratio")
    return figures


def limits_of(figures: dict[str, report.Figure]) -> dict[str, dict]:
    """The limits that apply to what was measured."""
    names = {f"{dtype}, {n} requests, cbjax against {BATCHED}": bound for (dtype, n), bound in AT_LEAST.items()}
    names |= {f"{dtype}, 64 requests, cbjax against {llama_cpp.NAME}": 1.0 for dtype in ("float32", "bfloat16")}
    return {name: report.limit(figures[name], bound, at_least=True) for name, bound in names.items() if name in figures}


def parse(argv: Sequence[str]) -> Namespace:
    options = report.parser("vs_transformers", __doc__)
    report.add_model_options(options)
    add_side_options(options, block_size=32)
    options.add_argument("--requests", type=int, nargs="+", default=[16, 64], help="batch sizes (default 16 64)")
    llama = options.add_mutually_exclusive_group()
    llama.add_argument("--llama-cpp", type=Path, metavar="DIR", help="where llama.cpp's programs are")
    llama.add_argument("--setup-llama-cpp", type=Path, metavar="DIR", help="build them there, and use them")
    args = options.parse_args(argv)
    if (args.llama_cpp or args.setup_llama_cpp) and args.model != "demo" and not args.model.endswith(".gguf"):
        options.error(f"llama.cpp reads GGUF files: --model is demo or a .gguf file; got {args.model}")
    if args.quick:
        args.requests, args.new_tokens, args.repeats = [2], 8, 1
    return args


def llama_cpp_of(args: Namespace) -> tuple[Path, Path] | None:
    """llama.cpp's programs, which are built if that was asked for, and the model's GGUF file; None: it has no part."""
    from cbjax.checkpoints import demo

    programs = llama_cpp.set_up(args.setup_llama_cpp) if args.setup_llama_cpp else args.llama_cpp
    if programs is None:
        return None
    return programs, demo.fetch() if args.model == "demo" else Path(args.model)


def run(args: Namespace, scratch: Path) -> tuple[dict[str, report.Figure], dict[str, str]]:
    """Everything that was asked for; figures, and versions of the peer's libraries."""
    from benchmarks.hf_folder import folder_of
    from cbjax.checkpoints import load

    folder = folder_of(args.model, scratch / "model")
    vocab_size = load(folder).config.vocab_size
    peer_python, llama = peer_python_of(args), llama_cpp_of(args)
    per_request = -(-(LONGEST + args.new_tokens) // args.block_size)
    figures: dict[str, report.Figure] = {}
    peer_versions: dict[str, str] = {}
    for dtype in args.dtype:
        job = Job(
            model=str(folder),
            dtype=dtype,
            threads=args.threads,
            prompts=prompts(max(args.requests), vocab_size, shortest=SHORTEST, longest=LONGEST),
            block_size=args.block_size,
            max_batch_tokens=args.max_batch_tokens,
            num_blocks=per_request * max(args.requests),
        )
        with sides(job, peer_python, scratch, llama_cpp=llama) as (made, versions):
            peer_versions |= versions
            for count in args.requests:
                figures |= measure(made, dtype, count, args.new_tokens, args.repeats)
    return figures, peer_versions


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    with report.threads(args.threads), tempfile.TemporaryDirectory() as scratch:
        figures, versions = run(args, Path(scratch))
        report.finish("vs_transformers", argv, args, figures, limits=limits_of(figures), peer_versions=versions)


if __name__ == "__main__":
    main()
