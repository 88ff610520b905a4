"""Chooses the kernels' sizes by what the compiler says of them: `python -m pallas_kernels.aot.tune --json FILE`.

Every size is compiled for every chip, and ranked by the microseconds that rows of a short, a middle and a long context
take for 1,024 tokens, each the larger of bytes over bandwidth and bundles over clock. What does not fit VMEM or does
not compile in time is out. The file is what `tuning.sizes_for` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pallas_kernels.aot.cases import Case
from pallas_kernels.aot.chips import CHIPS, Chip, chip_named
from pallas_kernels.aot.report import CompileError, Report, compile_case, report

CHUNKS = (256, 512, 1024, 2048)
CONTEXTS = (256, 1024, 8192)
# Where the clock is not known.
ASSUMED_CLOCK_HZ = 1.5e9
# Heads, kv heads and width of: SmolLM2-135M, Llama-3-8B and Qwen3, Llama-3.2-1B, Gemma-3-4B, gpt-oss-20b.
SHAPES = ((9, 3, 64), (32, 8, 128), (32, 8, 64), (8, 4, 256), (64, 8, 64))
BLOCK_SIZES = (16, 64, 128, 256)


def cases(shapes: Iterable[Sequence[int]], block_sizes: Iterable[int], dtypes: Iterable[str]) -> list[Case]:
    """What is tuned for."""
    return [
        Case(heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=size, dtype=dtype)
        for heads, kv_heads, head_dim in shapes
        for size in block_sizes
        for dtype in dtypes
    ]


def microseconds(chip: Chip, figures: Report) -> float:
    """Of 1,024 tokens."""
    clock = chip.clock_hz or ASSUMED_CLOCK_HZ
    return max(figures.memory_us, 1e6 * figures.bundles_per_1024_tokens / clock)


def tune(chip: Chip, case: Case, chunks: Iterable[int] = CHUNKS, *, timeout: float = 120.0) -> dict[str, Any] | None:
    """The best size of a case as an entry of the table; None if none compiles."""
    case = replace(case, vmem_limit_bytes=chip.vmem_bytes * 7 // 8)
    entries = []
    for chunk in chunks:
        if chunk < case.block_size:
            continue
        try:
            compiled = compile_case(chip, replace(case, chunk=chunk), timeout=timeout, asks_vmem=False)
        except CompileError:
            continue
        found = [report(chip, replace(case, chunk=chunk, context=context), compiled) for context in CONTEXTS]
        entries.append(
            {
                "chip": chip.name,
                "heads": case.heads,
                "kv_heads": case.kv_heads,
                "head_dim": case.head_dim,
                "block_size": case.block_size,
                "dtype": case.kv_dtype or case.dtype,
                "chunk": chunk,
                "inner_spills": found[0].inner_spills,
                "contexts": list(CONTEXTS),
                "bundles_per_1024_tokens": [round(each.bundles_per_1024_tokens) for each in found],
                "bytes_per_1024_tokens": [round(each.bytes_per_1024_tokens) for each in found],
                "memory_us": [round(each.memory_us, 3) for each in found],
                "break_even_ghz": [round(each.break_even_hz / 1e9, 2) for each in found],
                "microseconds": round(sum(microseconds(chip, each) for each in found), 2),
            }
        )
    # Where memory is the limit anyhow, the fewest bundles leave most room for what else there is.
    return min(entries, key=lambda entry: (entry["microseconds"], sum(entry["bundles_per_1024_tokens"])), default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Tunes and writes; entries of other chips, shapes or dtypes that the file has stay."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot.tune", description=__doc__)
    parser.add_argument("chips", nargs="*", default=["v5e", "v5p", "v6e", "tpu7x"], help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES))
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one compile (default 120)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    table = {_key(entry): entry for entry in json.loads(args.json.read_text())} if args.json.exists() else {}
    try:
        chips = [chip_named(name) for name in args.chips]
    except NotImplementedError as error:
        print(f"pallas_kernels.aot.tune: {error}", file=sys.stderr)
        return 1
    wanted = [(chip, case) for chip in chips for case in cases(SHAPES, args.block_sizes, args.dtypes)]
    for number, (chip, case) in enumerate(wanted, start=1):
        entry = tune(chip, case, args.chunks, timeout=args.timeout)
        if entry is None:
            print(f"{number}/{len(wanted)} {chip.name} {case}: nothing compiles", file=sys.stderr)
            continue
        table[_key(entry)] = entry
        print(
            f"{number}/{len(wanted)} {chip.name} {case.heads}/{case.kv_heads}/{case.head_dim} blocks of "
            f"{case.block_size}: chunks of {entry['chunk']}, {entry['bundles_per_1024_tokens'][-1]} bundles",
            flush=True,
        )
        lines = ",\n".join(json.dumps(each) for each in sorted(table.values(), key=lambda each: str(_key(each))))
        args.json.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("chip", "heads", "kv_heads", "head_dim", "block_size", "dtype"))


if __name__ == "__main__":
    sys.exit(main())
