"""What a chip's compiler knows of a kernel, without the chip: `python -m pallas_kernels.aot v6e --phase decode`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pallas_kernels.aot.cases import OPS, PHASES, Case
from pallas_kernels.aot.chips import CHIPS, chip_named
from pallas_kernels.aot.gpu_chips import GPU_CHIPS
from pallas_kernels.aot.gpu_report import GpuReport, inspect_gpu
from pallas_kernels.aot.gpu_table import gpu_table
from pallas_kernels.aot.report import CompileError, Report, inspect

# What is compiled for GPUs.
GPU_CASES = "pallas_kernels.aot.gpu_cases:build"
TPU_OPTIONS = ("chunk", "cores", "vmem_limit_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and writes it with --json; 0, or 1 with a message for what cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("chip", help=f"one of {', '.join((*CHIPS, *GPU_CHIPS))}")
    parser.add_argument("--op", default="paged_attention", help=f"one of {', '.join(OPS)}")
    parser.add_argument("--phase", default="decode", help=f"one of {', '.join(PHASES)}")
    for name, text in (
        ("heads", "query heads (default 32)"),
        ("kv-heads", "key and value heads (default 8)"),
        ("head-dim", "width of a head (default 128)"),
        ("block-size", "tokens of a block (default 128)"),
        ("rows", "rows of the batch (default 64)"),
        ("context", "tokens of each row with the new ones (default 8192)"),
        ("new-tokens", "of each row in prefill and kv_update (default 512)"),
        ("window", "of a sliding window (default: none)"),
        ("chunk", "tokens fetched at a time, of TPUs (default 1024)"),
        ("cores", "of the TPU, that share the rows (default 1)"),
        ("vmem-limit-bytes", "what the kernel may take, of TPUs (default 100 MiB)"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--soft-cap", type=float, help="of the scores (default: none)")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of queries, and of the store unless --kv-dtype names another"
    )
    parser.add_argument("--kv-dtype", help="of the store")
    parser.add_argument(
        "--program", metavar="MODULE:FUNCTION", help="of GPUs: a function that gives another GpuProgram to compile"
    )
    parser.add_argument("--sizes", default="{}", metavar="JSON", help="of the program, its keyword arguments")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    try:
        _check(args)
        report = _inspect(args)
    except (ValueError, NotImplementedError, ModuleNotFoundError, CompileError) as error:
        print(f"pallas_kernels.aot: {error}", file=sys.stderr)
        return 1
    print(gpu_table(report) if isinstance(report, GpuReport) else table(report))
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for what would be found after the compiler's work only."""
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be a positive number of seconds; got {args.timeout}")
    if args.json is None:
        return
    if args.json.is_dir() or not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: that is a folder, or its folder does not exist; name a file")
    if not os.access(args.json if args.json.exists() else args.json.absolute().parent, os.W_OK):
        raise ValueError(f"--json {args.json}: it cannot be written; name another file")


def _inspect(args: argparse.Namespace) -> Report | GpuReport:
    """What the arguments ask for; raises as `inspect` and `inspect_gpu`."""
    named = {field.name: getattr(args, field.name) for field in fields(Case)}
    given = {name: value for name, value in named.items() if value is not None}
    if args.chip in GPU_CHIPS:
        if args.program is None:
            _check_gpu(args, given)
        sizes = given if args.program is None else _sizes(args.sizes)
        return inspect_gpu(GPU_CHIPS[args.chip], args.program or GPU_CASES, sizes, timeout=args.timeout)
    if args.chip not in CHIPS:
        raise NotImplementedError(f"chips are {', '.join((*CHIPS, *GPU_CHIPS))}; got {args.chip!r}")
    return inspect(chip_named(args.chip), Case(**given), timeout=args.timeout)


def _check_gpu(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Raises where the GPU kernels have no such option, or are not made for this GPU."""
    if mine := [f"--{name.replace('_', '-')}" for name in TPU_OPTIONS if name in given]:
        raise ValueError(f"{', '.join(mine)}: of TPUs only; got {args.chip}")
    major, minor = GPU_CHIPS[args.chip].capability
    if major != 9:
        hoppers = [name for name, chip in GPU_CHIPS.items() if chip.capability[0] == 9]
        raise NotImplementedError(
            f"the GPU kernels are made of the instructions of compute capability 9.0 ({', '.join(hoppers)}); "
            f"got {args.chip}, which has {major}.{minor}. --program compiles others for it"
        )


def _sizes(text: str) -> dict[str, Any]:
    try:
        sizes = json.loads(text)
    except json.JSONDecodeError:
        sizes = None
    if not isinstance(sizes, dict):
        raise ValueError(f"--sizes must be a JSON object; got {text!r}")
    return sizes


def table(report: Report) -> str:
    """A line for each figure."""
    clock = f"{report.break_even_hz / 1e9:.2f} GHz"
    lines = {
        "kernel": f"{report.kernel} on {report.chip}",
        "VMEM": "not told" if report.vmem_bytes is None else f"{report.vmem_bytes / 2**20:.1f} MiB",
        "vector spills": f"{report.vector_spills} ({report.inner_spills} in innermost loops)",
        "code": f"{report.code_bytes / 2**10:.0f} KiB",
        "temporaries": f"{report.temp_bytes / 2**20:.1f} MiB; {report.alias_bytes / 2**20:.1f} MiB in place",
        "bundles / 1,024 tokens": f"{report.bundles_per_1024_tokens:.0f}",
        "bytes / 1,024 tokens": f"{report.bytes_per_1024_tokens / 2**20:.3f} MiB, "
        f"{report.kv_bytes_per_1024_tokens / 2**20:.3f} MiB of it the store's",
        "memory": f"{report.memory_us:.2f} us; the limit above a clock of {clock}",
        "flops / bundle": f"{report.flops_per_bundle:.0f}",
        "compute": "clock not known" if report.compute_us is None else f"{report.compute_us:.2f} us",
        "loops": report.loops,
    }
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(main())
