"""A digest of a plan: the same for equal plans on every machine and in every process."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from cbjax.scheduler import StepPlan


def plan_digest(plan: StepPlan) -> str:
    """64 bits as hex digits, of every field of the plan and of its parts, whatever fields these have."""
    parts: list[str | bytes] = []
    _collect(plan, parts)
    content = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _collect(value: Any, parts: list[str | bytes]) -> None:
    """Appends what tells `value` from every other; lengths come first, so that no two run into one."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        parts += f"{dtype.str}{value.shape}", value.astype(dtype, copy=False).tobytes()
    elif isinstance(value, tuple):
        parts.append(f"[{len(value)}]")
        for each in value:
            _collect(each, parts)
    elif is_dataclass(value):
        parts.append(f"{type(value).__name__}:")
        for name in field_names(type(value)):
            parts.append(f"{name}=")
            _collect(getattr(value, name), parts)
    elif value is None or isinstance(value, bool | int | str | np.integer | np.bool):
        value = value.item() if isinstance(value, np.generic) else value
        parts.append(f"{value!r};")
    else:
        raise TypeError(f"a plan holds arrays, ints, strings, tuples and dataclasses; got a {type(value).__name__}")


@functools.cache
def field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass, in order."""
    return tuple(field.name for field in fields(kind))
