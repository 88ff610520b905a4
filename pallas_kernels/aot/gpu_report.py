"""What the compiler knows of Mosaic GPU kernels: compiled in a process of its own, which dumps them to a folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.aot.compiling import check_cuda_plugin
from pallas_kernels.aot.gpu_chips import BLOCKS, REGISTERS, RESERVED_SHARED_BYTES, SHARED_BYTES, THREADS, GpuChip
from pallas_kernels.aot.gpu_listings import (
    TMA,
    WGMMA,
    Assembled,
    Launch,
    dumped,
    parse_assembler,
    parse_launch,
    ptx_census,
    sass_census,
)
from pallas_kernels.aot.gpu_program import load_program
from pallas_kernels.aot.report import CompileError

# Where NVIDIA's wheels put nvdisasm, by CUDA 13 and 12.
_WHEELS = ("nvidia.cu13", "nvidia.cuda_nvdisasm")
# What jax starts as nvdisasm. Of a file that jax makes for it, jax would leave the folder behind.
_NVDISASM = """#!/bin/sh
{nvdisasm} "$@"
status=$?
for argument; do
  case "$argument" in
    /tmp/mosaic-gpu-*/kernel.bin) rm -f "$argument"; rmdir "${{argument%/*}}";;
  esac
done
exit $status
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernel:
    """One kernel.

    Attributes:
      name: its entry in PTX.
      registers: of a thread, as it is started (`setmaxnreg` changes that of warpgroups).
      spills: bytes that a thread stores and loads for want of registers.
      stack_bytes: of a thread.
      shared_bytes: of a block of threads, that of the program and that asked for at launch.
      barriers: named barriers; those in shared memory (mbarrier) are not among them.
      blocks: of the grid; threads: of a block.
      resident_blocks: that a multiprocessor has room for at a time.
      wgmma, tma: instructions in PTX that multiply matrices by warpgroups, and that copy tiles from or to memory.
      ptx: instructions in PTX by family (`gpu_listings.PTX_FAMILIES`).
      sass: machine instructions by opcode.
      remarks: the assembler's, on what may make it slow.
    """

    name: str
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    barriers: int
    blocks: int
    threads: int
    resident_blocks: int
    wgmma: int
    tma: int
    ptx: dict[str, int]
    sass: dict[str, int]
    remarks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """Of one program on one chip.

    Attributes:
      chip, program: names.
      sizes: that the program was built for, where they are not its own.
      registers, shared_bytes: the most that a kernel takes.
      spills, wgmma, tma: of all kernels together.
      temp_bytes, alias_bytes: of the executable: what it takes beside arguments and results, and results that are
        arguments.
      kernels: Mosaic GPU's, each once, in the order in which they were compiled; what XLA itself makes is not among
        them.
    """

    chip: str
    program: str
    sizes: dict[str, Any]
    registers: int
    spills: int
    shared_bytes: int
    wgmma: int
    tma: int
    temp_bytes: int
    alias_bytes: int
    kernels: list[GpuKernel]


def inspect_gpu(
    chip: GpuChip, program: str, sizes: Mapping[str, Any] | None = None, *, timeout: float = 600.0
) -> GpuReport:
    """Compiles a program for a chip, in a child process of at most so many seconds, and tells what is known of it.

    Args:
      program: `MODULE:FUNCTION` that gives a `GpuProgram`; both processes import it.
      sizes: its keyword arguments, of what JSON has.

    Raises:
      ModuleNotFoundError: jax's CUDA plugin or nvdisasm is not installed.
      ValueError, NotImplementedError: there is no such program.
      CompileError: it does not compile in time, or has no Mosaic GPU kernel.
    """
    check_cuda_plugin()
    nvdisasm, sizes = _nvdisasm(), dict(sizes or {})
    load_program(program, sizes)  # whose errors are this process's
    with tempfile.TemporaryDirectory(prefix="pallas-aot-") as name:
        folder = Path(name)
        facts = _compile(chip, program, sizes, folder, nvdisasm, timeout)
        try:
            kernels = [_kernel(ptx) for ptx in dumped(folder)]
        except (OSError, ValueError) as error:
            raise CompileError(f"jax's dump of {program} for {chip.name} is not as expected: {error}") from error
    if not kernels:
        raise CompileError(f"{program} for {chip.name} has no Mosaic GPU kernel")
    return GpuReport(
        chip=chip.name,
        program=program,
        sizes=sizes,
        registers=max(kernel.registers for kernel in kernels),
        spills=sum(kernel.spills for kernel in kernels),
        shared_bytes=max(kernel.shared_bytes for kernel in kernels),
        wgmma=sum(kernel.wgmma for kernel in kernels),
        tma=sum(kernel.tma for kernel in kernels),
        **facts,
        kernels=kernels,
    )


def resident_blocks(assembled: Assembled, launch: Launch) -> int:
    """Blocks of threads that a multiprocessor has registers, shared memory and threads for at a time.

    A warp gets registers in steps of 8 a thread, a block shared memory in steps of 128 bytes.
    """
    shared = assembled.static_shared_bytes + launch.shared_bytes
    registers = -(-assembled.registers // 8) * 8 * launch.threads
    taken = -(-shared // 128) * 128 + RESERVED_SHARED_BYTES
    return min(REGISTERS // registers, SHARED_BYTES // taken, THREADS // launch.threads, BLOCKS)


def _compile(
    chip: GpuChip, program: str, sizes: Mapping[str, Any], folder: Path, nvdisasm: Path, timeout: float
) -> dict[str, int]:
    """Fields of the report that the executable tells; its kernels are in the folder afterwards."""
    write_nvdisasm(folder, nvdisasm)
    env = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_COMPILATION_CACHE="false",  # what is read from there is not dumped
        JAX_TRACEBACK_FILTERING="off",  # so that the last that a failure prints is its message
        MOSAIC_GPU_DUMP_TO=str(folder),
        CUDA_ROOT=str(folder),
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
    )
    command = [sys.executable, "-m", "pallas_kernels.aot.gpu_child", chip.name, program, json.dumps(sizes)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{program} for {chip.name} did not compile within {timeout:.0f} s") from None
    if done.returncode:
        raise CompileError(f"{program} for {chip.name} does not compile: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _kernel(ptx: Path) -> GpuKernel:
    assembled = parse_assembler(ptx.with_suffix(".ptxas").read_text())
    launch = parse_launch(ptx.with_suffix(".mlir-passes.log").read_text(errors="replace"))
    families = ptx_census(ptx.read_text())
    return GpuKernel(
        name=assembled.name,
        registers=assembled.registers,
        spills=assembled.spill_store_bytes + assembled.spill_load_bytes,
        stack_bytes=assembled.stack_bytes,
        shared_bytes=assembled.static_shared_bytes + launch.shared_bytes,
        barriers=assembled.barriers,
        blocks=launch.blocks,
        threads=launch.threads,
        resident_blocks=resident_blocks(assembled, launch),
        wgmma=families.get(WGMMA, 0),
        tma=families.get(TMA, 0),
        ptx=families,
        sass=sass_census(ptx.with_suffix(".sass_ctrl").read_text()),
        remarks=assembled.remarks,
    )


def write_nvdisasm(folder: Path, nvdisasm: Path) -> Path:
    """What jax is to start as nvdisasm, in a folder that it takes for a CUDA toolkit's."""
    tool = folder / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text(_NVDISASM.format(nvdisasm=shlex.quote(str(nvdisasm))))
    tool.chmod(0o755)
    return tool


def _nvdisasm() -> Path:
    """The program that reads machine code: of a wheel, or of a toolkit.

    Raises:
      ModuleNotFoundError: there is none.
    """
    for package in _WHEELS:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # there is no package `nvidia` at all
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder) / "bin" / "nvdisasm").exists():
                return Path(folder) / "bin" / "nvdisasm"
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    if found is None:
        raise ModuleNotFoundError(
            "nvdisasm is not installed: pip install 'cbjax[aot]' has it (nvidia-cuda-nvdisasm), as has a CUDA toolkit"
        )
    return Path(found)
