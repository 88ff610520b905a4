"""What the compiler knows of a kernel: compiled in a process of its own, which libtpu writes its listings for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.aot.bundles import Loop, listings, parse
from pallas_kernels.aot.cases import Case, build
from pallas_kernels.aot.chips import Chip


class CompileError(RuntimeError):
    """A case did not compile, or took too long; the text is the compiler's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one kernel on one chip.

    Attributes:
      chip, kernel: names.
      case: what was compiled.
      vmem_bytes: as the compiler allocates it; None where it does not say.
      vector_spills: vector registers stored for want of more, in the whole kernel; `inner_spills` in loops that have no
        other inside.
      code_bytes: of the executable.
      temp_bytes, alias_bytes: of the executable: what it takes beside arguments and results, and results that are
        arguments.
      loops: bundles of each loop, those inside in brackets.
      bundles_per_1024_tokens: issued for 1,024 tokens of keys and values read (in an update written), all that is done
        for a row or a tile of queries included.
      bytes_per_1024_tokens: moved between HBM and the core, likewise.
      kv_bytes_per_1024_tokens: of the store's, those that must be read or written.
      flops_per_bundle: of attention, what is masked left out; against a core's peak the use made of its matrix units.
      memory_us, compute_us: microseconds for 1,024 tokens by the bandwidth, and by the clock where that is known.
      break_even_hz: the clock at which both are equal; above it memory is the limit.
    """

    chip: str
    kernel: str
    case: dict[str, Any]
    vmem_bytes: int | None
    vector_spills: int
    inner_spills: int
    code_bytes: int
    temp_bytes: int
    alias_bytes: int
    loops: str
    bundles_per_1024_tokens: float
    bytes_per_1024_tokens: float
    kv_bytes_per_1024_tokens: float
    flops_per_bundle: float
    memory_us: float
    compute_us: float | None
    break_even_hz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """facts: what the executable says of itself, as fields of `Report`; program: its kernel's loops."""

    facts: dict[str, Any]
    program: Loop


def compile_case(chip: Chip, case: Case, *, timeout: float = 600.0, asks_vmem: bool = True) -> Compiled:
    """Compiles a case for a chip, in a child process of at most so many seconds; once more to learn what VMEM it takes.

    Raises:
      ValueError, NotImplementedError: there is no such kernel.
      CompileError: it does not compile in time.
    """
    kernel = build(case).kernel  # whose errors are this process's
    with tempfile.TemporaryDirectory(prefix="pallas-aot-") as folder:
        env = dict(
            os.environ,
            JAX_PLATFORMS="cpu",
            LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        )
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pallas_kernels.aot.child", chip.name, json.dumps(asdict(case))]
        command += ["vmem"] * asks_vmem
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{case} for {chip.name} did not compile within {timeout:.0f} s") from None
        if done.returncode:
            raise CompileError(f"{case} for {chip.name} does not compile: {done.stderr.strip()[-2000:]}")
        found = [path for name, path in listings(Path(folder)).items() if name.startswith(kernel)]
        if not found:
            raise CompileError(f"libtpu wrote no listing of {kernel} for {chip.name}")
        return Compiled(facts=json.loads(done.stdout.splitlines()[-1]), program=parse(found[-1].read_text()))


def report(chip: Chip, case: Case, compiled: Compiled) -> Report:
    """The figures of a case; `compiled` may be one of another context."""
    built, program = build(case), compiled.program
    per = 1024 / built.kv_tokens
    total = program.total(built.trips)
    bundles, moved = per * total, per * built.moved_bytes
    return Report(
        chip=chip.name,
        kernel=built.kernel,
        case=asdict(case),
        **compiled.facts,
        vector_spills=sum(loop.spills for loop in program.walk()),
        inner_spills=sum(loop.spills for loop in program.walk() if not loop.loops),
        loops=program.describe(),
        bundles_per_1024_tokens=bundles,
        bytes_per_1024_tokens=moved,
        kv_bytes_per_1024_tokens=per * built.kv_bytes,
        flops_per_bundle=built.flops / total,
        memory_us=1e6 * moved / chip.hbm_bytes_per_second,
        compute_us=None if chip.clock_hz is None else 1e6 * bundles / chip.clock_hz,
        break_even_hz=bundles / (moved / chip.hbm_bytes_per_second),
    )


def inspect(chip: Chip, case: Case, *, timeout: float = 600.0) -> Report:
    """Compiles a case and tells what is known of it; raises as `compile_case`."""
    return report(chip, case, compile_case(chip, case, timeout=timeout))
