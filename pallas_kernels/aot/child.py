"""The process that compiles one case, for which alone libtpu then writes listings: `CHIP CASE [vmem]` to JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax

from pallas_kernels.aot.cases import Case, build
from pallas_kernels.aot.chips import Chip, chip_named
from pallas_kernels.aot.compiling import compile_for

_OVERFLOW = re.compile(r"Scoped allocation with size ([\d.]+)([KMG]?) and limit")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Too little for any kernel, so that the compiler says how much it takes.
_NO_VMEM = 64 << 10


def _vmem_bytes(chip: Chip, case: Case) -> int | None:
    """What the compiler says when it is given too little."""
    built = build(case, vmem_limit_bytes=_NO_VMEM)
    try:
        compile_for(chip, built.function, *built.arguments, donate=built.donate)
    except jax.errors.JaxRuntimeError as error:
        found = _OVERFLOW.search(str(error))
        return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])
    return None


def _child(chip: Chip, case: Case, asks_vmem: bool) -> dict[str, Any]:
    """Compiles, and says what the executable says of itself."""
    vmem_bytes = _vmem_bytes(chip, case) if asks_vmem else None
    built = build(case)
    memory = compile_for(chip, built.function, *built.arguments, donate=built.donate).memory_analysis()
    assert memory is not None, "libtpu tells what an executable takes"
    return {
        "vmem_bytes": vmem_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(_child(chip_named(sys.argv[1]), Case(**json.loads(sys.argv[2])), "vmem" in sys.argv[3:])))
