"""A GPU report as lines of text."""

from __future__ import annotations

from pallas_kernels.aot.gpu_report import GpuReport

# Machine instructions that are shown, of the many that there are.
_SHOWN = 12


def gpu_table(report: GpuReport) -> str:
    """A line for each figure, kernel by kernel, and then those of the executable."""
    lines = []
    for kernel in report.kernels:
        lines += [
            ("kernel", f"{kernel.name} on {report.chip}"),
            (
                "registers",
                f"{kernel.registers} of a thread; {kernel.spills} B spilled, {kernel.stack_bytes} B of stack",
            ),
            ("shared memory", f"{kernel.shared_bytes / 2**10:.1f} KiB of a block; {kernel.barriers} named barriers"),
            ("blocks", f"{kernel.blocks} of {kernel.threads} threads, {kernel.resident_blocks} on a multiprocessor"),
            ("wgmma, tma", f"{kernel.wgmma}, {kernel.tma}"),
            ("PTX", _counts(kernel.ptx)),
            ("SASS", _counts(dict(list(kernel.sass.items())[:_SHOWN]))),
            *(("remark", remark) for remark in kernel.remarks),
        ]
    lines.append(("temporaries", f"{report.temp_bytes / 2**20:.1f} MiB; {report.alias_bytes / 2**20:.1f} MiB in place"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)


def _counts(census: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in census.items()) or "none"
