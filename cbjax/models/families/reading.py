"""Typed access to the values of a configuration, whose errors say what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def given(mapping: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of `key`, else (also for null) `default`. Raises ValueError if there is neither."""
    value = mapping.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"The model's configuration must have {key!r}. It has {', '.join(sorted(mapping))}.")
    return value


def integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The integer `key`. Raises ValueError for another type, or as `given`."""
    value = given(mapping, key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} in the model's configuration must be an integer. Got {value!r}.")
    return value


def number(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The number `key` as a float. Raises ValueError for another type, or as `given`."""
    value = given(mapping, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key!r} in the model's configuration must be a number. Got {value!r}.")
    return float(value)


def per_layer(mapping: Mapping[str, Any], key: str, num_layers: int) -> list[Any] | None:
    """The first `num_layers` values of the list `key`; None if it is absent or null.

    Raises ValueError for another type or a shorter list.
    """
    values = mapping.get(key)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) < num_layers:
        raise ValueError(
            f"{key!r} in the model's configuration must list a value for each of {num_layers} layers. Got {values!r}."
        )
    return list(values[:num_layers])


def unsupported(what: str, got: Any, supported: Sequence[str]) -> ValueError:
    """The error for a setting that no code here implements."""
    return ValueError(f"Unsupported {what}: {got!r}. Supported: {', '.join(supported)}.")
