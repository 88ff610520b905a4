"""What the TPU compiler knows of a kernel, without a TPU: `python -m pallas_kernels.aot v6e --phase decode`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from pallas_kernels.aot.cases import OPS, PHASES, Case
from pallas_kernels.aot.chips import CHIPS, chip_named
from pallas_kernels.aot.report import CompileError, Report, inspect


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and writes it with --json; 0, or 1 with a message for what cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("chip", help=f"one of {', '.join(CHIPS)}")
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
        ("chunk", "tokens fetched at a time (default 1024)"),
        ("cores", "of the device, that share the rows (default 1)"),
        ("vmem-limit-bytes", "what the kernel may take (default 100 MiB)"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--soft-cap", type=float, help="of the scores (default: none)")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of queries, and of the store unless --kv-dtype names another"
    )
    parser.add_argument("--kv-dtype", help="of the store")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    given = {field.name: getattr(args, field.name) for field in fields(Case)}
    try:
        report = inspect(
            chip_named(args.chip),
            Case(**{name: value for name, value in given.items() if value is not None}),
            timeout=args.timeout,
        )
    except (ValueError, NotImplementedError, CompileError) as error:
        print(f"pallas_kernels.aot: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0


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
