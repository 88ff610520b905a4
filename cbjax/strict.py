"""Small checks of what users hand in, with errors that say the rule, the value and the remedy."""

from __future__ import annotations

import difflib
import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np


def rejects_unknown_fields(cls):
    """Class decorator: a misspelt field is a TypeError that names the nearest real one."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args: Any, **kwargs: Any) -> None:
        names = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; its fields are {', '.join(names)}"
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        init(self, *args, **kwargs)

    cls.__init__ = checked
    return cls


def check_int(name: str, value: object, *, minimum: int, none: bool = False) -> int | None:
    """An int of at least `minimum`, or None where allowed; returned as Python's own int, which never overflows.

    Raises:
      TypeError, ValueError: it is not.
    """
    if value is None and none:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int{' or None' if none else ''}; got {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value!r}")
    return number


def set_checked_ints(target: object, names: tuple[str, ...], *, minimum: int, none: bool = False) -> None:
    """`check_int` for fields of a frozen dataclass, each replaced by Python's own int."""
    for name in names:
        object.__setattr__(target, name, check_int(name, getattr(target, name), minimum=minimum, none=none))


def check_fraction(name: str, value: object, *, none: bool = False) -> None:
    """A real number in [0, 1], or None where allowed.

    Raises:
      TypeError, ValueError: it is not.
    """
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in [0, 1]{' or None' if none else ''}; got {value!r}")
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1]; got {value!r}")


def check_number(name: str, value: object, *, minimum: float) -> None:
    """A finite real number of at least `minimum`.

    Raises:
      TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of at least {minimum}; got {value!r}")
    if not minimum <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least {minimum}; got {value!r}")


def check_bool(name: str, value: object, *, none: bool = False) -> None:
    """A bool, or None where allowed.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(value, bool) and not (none and value is None):
        raise TypeError(f"{name} must be True or False{' or None' if none else ''}; got {value!r}")


def checked_ids(prompt: Sequence[int] | np.ndarray, eos_token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """The prompt as i32[tokens], a read-only copy.

    Raises:
      TypeError, ValueError: it is empty or no flat sequence of ids, or an id is outside the vocabulary.
    """
    wrong = [id for id in eos_token_ids if not 0 <= id < vocab_size]
    if wrong:
        raise ValueError(f"EOS ids must be in [0, {vocab_size}), the model's vocabulary; got {wrong[:5]}")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # ragged, so not flat either
        ids = np.empty((0, 0), np.int32)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(f"a prompt is a flat sequence of int token ids; got {prompt!r:.80}")
    if not ids.size:
        raise ValueError("a prompt has at least one token; got none (to continue from nothing, pass the BOS id)")
    if (ids < 0).any() or (ids >= vocab_size).any():
        wrong = ids[(ids < 0) | (ids >= vocab_size)][:5].tolist()
        raise ValueError(f"token ids must be in [0, {vocab_size}), the model's vocabulary; got {wrong}")
    ids = ids.astype(np.int32)
    ids.setflags(write=False)
    return ids
