"""Inputs as JSON values and back. Arrays are base64 of as many bytes per element as the largest one needs."""

from __future__ import annotations

import base64
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from cbjax.recording.digest import field_names
from cbjax.recording.inputs import Add, Cancel, Input, Renew, Reset, Schedule, Start, Update
from cbjax.scheduler import Request, SchedulerConfig, eviction_named, scheduler_named
from cbjax.scheduler.prefix import blake2b_128

_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in (Start, Add, Cancel, Schedule, Update, Renew, Reset)}
_MESSAGES: dict[str, type] = {"request": Request, "config": SchedulerConfig}
_NAMED = {"policy": scheduler_named, "eviction": eviction_named}
_BLOCK_HASH = "blake2b_128"


class RecordingError(ValueError):
    """A file is no recording that this version can read, or is damaged."""


def encode(given: Input) -> list[Any]:
    """The input as JSON.

    Raises:
      ValueError: a config has a policy or a hash function that no name stands for.
    """
    values: dict[str, Any] = {}
    for name in field_names(type(given)):
        value = getattr(given, name)
        if value is not None:
            values[name] = _fields_to_json(value) if name in _MESSAGES else _to_json(name, value)
    return [type(given).__name__.lower(), *([values] if values else [])]


def decode(document: Any) -> Input:
    """The input that `encode` was given.

    Raises:
      RecordingError: there is none.
    """
    try:
        kind, values = document[0], dict(document[1]) if len(document) > 1 else {}
        for name, message in _MESSAGES.items():
            if name in values:
                values[name] = _from_fields(message, values[name])
        return _from_fields(_KINDS[kind], values)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise RecordingError(f"it is no input of the scheduler: {error}") from error


def _fields_to_json(message: Any) -> dict[str, Any]:
    return {name: _to_json(name, getattr(message, name)) for name in field_names(type(message))}


def _to_json(name: str, value: Any) -> Any:
    if name in _NAMED:
        return _name_of(name, value)
    if name == "block_hash":
        if value is not blake2b_128:
            raise ValueError(f"block_hash {value!r} cannot be recorded, only the default one: do not record")
        return _BLOCK_HASH
    if isinstance(value, np.ndarray):
        return {value.dtype.newbyteorder("<").str: _pack(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return [_to_json("", each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} cannot be recorded: a {type(value).__name__} has no form in a recording")


def _name_of(field: str, policy: Any) -> str:
    """The name under which a replay finds an equal policy."""
    try:
        if _NAMED[field](policy.name) == policy:
            return policy.name
    except ValueError:
        pass
    raise ValueError(
        f"{field} {policy.name!r} cannot be recorded: it is not the one of that name that cbjax has, so no replay "
        "could find it; use one that a name stands for, or do not record"
    )


def _from_fields(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass of these fields.

    Raises:
      ValueError: it has no such field, or needs one that is missing.
    """
    known = {field.name: field for field in fields(kind)}
    if unknown := values.keys() - known.keys():
        raise ValueError(f"{kind.__name__} has no field {sorted(unknown)} in this version of cbjax")
    needed = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := needed - values.keys():
        raise ValueError(f"{kind.__name__} lacks {sorted(missing)}, which this version of cbjax needs")
    return kind(**{name: _from_json(name, value) for name, value in values.items()})


def _from_json(name: str, value: Any) -> Any:
    if name in _NAMED:
        return _NAMED[name](value)
    if name == "block_hash":
        if value != _BLOCK_HASH:
            raise ValueError(f"block_hash {value!r} is not known to this version of cbjax")
        return blake2b_128
    if isinstance(value, dict):
        ((tag, data),) = value.items()
        return base64.b64decode(data, validate=True) if tag == "bytes" else _unpack(tag, data)
    if isinstance(value, list):
        return tuple(_from_json("", each) for each in value)
    return value


def _pack(array: np.ndarray) -> str:
    """Elements of a 1-D array, little-endian without the zero bytes that none of them needs; their width goes first."""
    size = array.dtype.itemsize
    assert array.ndim == 1
    assert size < 10, "the width is one digit"
    width = size
    if array.dtype.kind in "iu" and array.min(initial=0) >= 0:
        width = max(1, -(-int(array.max(initial=0)).bit_length() // 8))
    content = array.astype(array.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, size)[:, :width].tobytes()
    return f"{width}{base64.b64encode(content).decode()}"


def _unpack(dtype_name: str, data: str) -> np.ndarray:
    dtype = np.dtype(dtype_name)
    if dtype.kind not in "iub":
        raise ValueError(f"an array of {dtype_name}")
    content = np.frombuffer(base64.b64decode(data[1:], validate=True), np.uint8).reshape(-1, int(data[0]))
    whole = np.zeros((len(content), dtype.itemsize), np.uint8)
    whole[:, : content.shape[1]] = content
    array = whole.reshape(-1).view(dtype)
    array.setflags(write=False)
    return array
