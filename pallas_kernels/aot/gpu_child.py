"""The process that compiles one program, for which alone jax dumps what it makes: `CHIP BUILDER SIZES` to JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from pallas_kernels.aot.compiling import compile_for
from pallas_kernels.aot.gpu_chips import GPU_CHIPS, GpuChip
from pallas_kernels.aot.gpu_program import load_program


def _child(chip: GpuChip, builder: str, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Compiles, and says what the executable says of itself."""
    program = load_program(builder, sizes)
    memory = compile_for(chip, program.function, *program.arguments, donate=program.donate).memory_analysis()
    assert memory is not None, "XLA tells what an executable for a GPU takes"
    return {"temp_bytes": memory.temp_size_in_bytes, "alias_bytes": memory.alias_size_in_bytes}


if __name__ == "__main__":
    print(json.dumps(_child(GPU_CHIPS[sys.argv[1]], sys.argv[2], json.loads(sys.argv[3]))))
