"""What jax's Mosaic GPU writes of a kernel that it compiles, read: the assembler's figures, PTX, machine code, launch.

With MOSAIC_GPU_DUMP_TO each kernel leaves files of one name: `.ptx`; `.ptxas`, what the assembler that made the
executable says (the one in jax's plugin, or the one it was told of); `.sass_ctrl`, the machine code by nvdisasm, each
line after its control codes; and `.mlir-passes.log`, every stage of the host's and the kernel's code.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Instructions of PTX that tell how a kernel works, by how they begin; the first that fits counts.
PTX_FAMILIES = (
    "wgmma.mma_async",
    "tcgen05.mma",
    "mma.sync",
    "cp.async.bulk.tensor",
    "cp.async.bulk.prefetch",
    "cp.async.bulk.shared",
    "cp.async.bulk.global",
    "cp.async.ca",
    "cp.async.cg",
    "mbarrier.try_wait",
    "ldmatrix",
    "stmatrix",
    "ld.local",
    "st.local",
    "setmaxnreg",
    "bar.sync",
    "ex2",
)
WGMMA = "wgmma.mma_async"
TMA = "cp.async.bulk.tensor"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STATEMENT = re.compile(r"[;{}\n]")
_OPCODE = re.compile(r"(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+(?:::\w+)*)+)")
_SASS_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_EXPECTED = re.compile(r"bytes gmem|Compiling entry|Function properties|Used \d+ registers|Compile time")
_PASS = "// -----// IR Dump"
_LAUNCH = re.compile(
    r"gpu\.launch_func .*? blocks in \((%[\w#]+), (%[\w#]+), (%[\w#]+)\) threads in \((%[\w#]+), (%[\w#]+), (%[\w#]+)\)"
    r".*? dynamic_shared_memory_size (%[\w#]+)"
)
_CONSTANT = re.compile(r"(%[\w#]+) = (?:llvm\.mlir\.constant\(|arith\.constant )(\d+) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What the assembler says of a kernel.

    Attributes:
      name: its entry in PTX.
      registers: of a thread.
      barriers: named barriers; those in shared memory (mbarrier) are not among them.
      static_shared_bytes: of a block of threads.
      stack_bytes, spill_store_bytes, spill_load_bytes: of a thread.
      remarks: all else that it says, as that it made wgmma instructions wait for each other.
    """

    name: str
    registers: int
    barriers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    remarks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the host starts a kernel: blocks of the grid, threads of a block, and the shared memory that a block gets."""

    blocks: int
    threads: int
    shared_bytes: int


def parse_assembler(text: str) -> Assembled:
    """What `ptxas -v` prints of a file with one kernel.

    Raises:
      ValueError: it is not that.
    """
    entry, stack, used = _ENTRY.search(text), _STACK.search(text), _USED.search(text)
    if entry is None or stack is None or used is None:
        raise ValueError(f"the assembler does not say what the kernel takes: {text[:2000]!r}")
    line = text[used.start() :].splitlines()[0]
    barriers, shared = _BARRIERS.search(line), _SHARED.search(line)
    remarks = [line.strip() for line in text.splitlines() if line.startswith("ptxas") and not _EXPECTED.search(line)]
    return Assembled(
        name=entry.group(1),
        registers=int(used.group(1)),
        barriers=int(barriers.group(1)) if barriers else 0,
        static_shared_bytes=int(shared.group(1)) if shared else 0,
        stack_bytes=int(stack.group(1)),
        spill_store_bytes=int(stack.group(2)),
        spill_load_bytes=int(stack.group(3)),
        remarks=[line.partition(":")[2].strip() for line in remarks],
    )


def parse_launch(text: str) -> Launch:
    """The last stage of a log of passes in which the host still starts the kernel by one operation.

    Raises:
      ValueError: there is none, or its sizes are not constants.
    """
    at = text.rfind("gpu.launch_func ")
    found = _LAUNCH.match(text, at) if at >= 0 else None
    constants = dict(_CONSTANT.findall(text, max(text.rfind(_PASS, 0, at), 0), at)) if found else {}
    if found is None or not all(name in constants for name in found.groups()):
        raise ValueError("the compiler's log does not say how the kernel is started")
    x, y, z, threads_x, threads_y, threads_z, shared = (int(constants[name]) for name in found.groups())
    return Launch(blocks=x * y * z, threads=threads_x * threads_y * threads_z, shared_bytes=shared)


def ptx_census(text: str) -> dict[str, int]:
    """How many instructions of each of `PTX_FAMILIES` a file of PTX has; those that it has none of are left out."""
    opcodes = (_OPCODE.match(statement.strip()) for statement in _STATEMENT.split(_COMMENT.sub("", text)))
    counts = Counter(
        next((family for family in PTX_FAMILIES if opcode.group(1).startswith(family)), None)
        for opcode in opcodes
        if opcode is not None
    )
    return {family: counts[family] for family in PTX_FAMILIES if counts[family]}


def sass_census(text: str) -> dict[str, int]:
    """How many machine instructions of each opcode nvdisasm's text has, the most first."""
    return dict(Counter(_SASS_OPCODE.findall(text)).most_common())


def dumped(folder: Path) -> list[Path]:
    """The PTX files in a folder that was dumped to, in the order in which their kernels were compiled."""
    return sorted(folder.glob("*.ptx"), key=lambda path: int(path.stem.rpartition("_")[2]))
