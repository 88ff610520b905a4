"""A program for GPUs by name, so that a process of its own can compile it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgram:
    """A function with Mosaic GPU kernels, its arguments, and which of them to donate, as `compile_for` takes them."""

    function: Callable
    arguments: Sequence[Any]
    donate: Sequence[int] = ()


def load_program(builder: str, sizes: Mapping[str, Any]) -> GpuProgram:
    """What `MODULE:FUNCTION` gives for sizes as keyword arguments.

    Raises:
      ValueError: there is no such function, it takes other arguments, or it gives no program.
      Exception: what the function raises.
    """
    module, _, name = builder.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(**sizes)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"a program is MODULE:FUNCTION and its sizes; got {builder!r}, {dict(sizes)}: {error}"
        ) from error
    program = function(**sizes)
    if not isinstance(program, GpuProgram):
        raise ValueError(f"{builder} must give a GpuProgram; got {type(program).__name__}")
    return program
