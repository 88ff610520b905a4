"""What `paged_attention` is given, checked before any kernel is made; the same for all kernels."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Positions are 32-bit integers, so a window of this many tokens sees everything.
EVERYTHING = 2**31 - 1


def check_rows(
    table: Any, slot: Any, q_start: Any, context_len: Any, num_rows: Any, *, num_tokens: int, single_token_rows: bool
) -> None:
    """Raises ValueError where the arrays that describe a step's rows do not go together.

    What they hold is not known while a program is traced, and is not looked at: a block table has a column for every
    block of the longest context.
    """
    rows = slot.shape[0] if _is_array(slot) and slot.ndim == 1 else "rows"
    after = rows + 1 if isinstance(rows, int) else "rows + 1"
    wide = table.shape if _is_array(table) and table.ndim == 2 else ("slots + 1", "max_blocks")
    for name, array, shape in (
        ("table", table, wide),
        ("slot", slot, (rows,)),
        ("q_start", q_start, (after,)),
        ("context_len", context_len, (rows,)),
        ("num_rows", num_rows, ()),
    ):
        if not _is_array(array) or array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} must be an array i32[{', '.join(map(str, shape))}]; got {_told(array)}")
        if 0 in array.shape:
            raise ValueError(f"{name} must not be empty; got {_told(array)}")
    if num_tokens < 1:
        raise ValueError("q must have at least one token; got none")
    if single_token_rows and rows != num_tokens:
        raise ValueError(f"single_token_rows needs as many rows as tokens ({num_tokens}); got {rows} rows")


def check_arrays(q: Any, k: Any, v: Any, kv: Any) -> None:
    """Raises ValueError where queries, keys, values and store do not go together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not _is_array(array) or array.ndim != 3 or 0 in array.shape[1:]:
            raise ValueError(f"{name} must be an array [tokens, heads, head_dim]; got {_told(array)}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of floating-point numbers; got {_told(array)}")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k and v must have one shape and dtype; got {_told(k)} and {_told(v)}")
    if (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q and k must have as many tokens and as wide heads; got {list(q.shape)} and {list(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"kv heads must divide query heads; got {k.shape[1]} and {q.shape[1]}")
    if not _is_array(kv) or kv.ndim != 4 or kv.shape[0] < 3:
        raise ValueError(f"kv must be an array [num_blocks + 2, planes, block_size, lanes]; got {_told(kv)}")


def check_options(
    heads: int,
    kv_heads: int,
    kv_dtype: jax.typing.DTypeLike,
    *,
    scale: Any,
    window: Any,
    soft_cap: Any,
    sinks: Any,
    k_scales: Any,
    v_scales: Any,
) -> int | None:
    """Raises ValueError for options that cannot be; returns the window, None where it reaches over everything."""
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"scale must be a finite number or None; got {scale!r}")
    if soft_cap is not None and not (_is_finite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap must be a positive, finite number or None; got {soft_cap!r}")
    if sinks is not None and not (_is_floating(sinks) and sinks.shape == (heads,)):
        raise ValueError(f"sinks must be an array [heads], [{heads}], of floating-point numbers; got {_told(sinks)}")
    if (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales come together; got one of them")
    is_narrow = jnp.dtype(kv_dtype).itemsize == 1
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None and not (_is_floating(scales) and scales.shape == (kv_heads,)):
            raise ValueError(f"{name} must be an array f32[kv_heads], [{kv_heads}]; got {_told(scales)}")
        if scales is not None and not is_narrow:
            raise ValueError(f"{name} are for stores of 8 bits; got a store of {jnp.dtype(kv_dtype)}")
    if jnp.issubdtype(kv_dtype, jnp.integer) and k_scales is None:
        raise ValueError(f"a store of {jnp.dtype(kv_dtype)} needs k_scales and v_scales")
    return check_window(window)


def check_window(window: Any) -> int | None:
    """The window, None where it reaches over everything. Raises ValueError if it is none."""
    if window is None:
        return None
    try:
        tokens = None if isinstance(window, bool | np.bool_) else operator.index(window)
    except TypeError:
        tokens = None
    if tokens is None or tokens < 1:
        raise ValueError(f"window must be an int of at least 1, or None; got {window!r}")
    return None if tokens >= EVERYTHING else tokens


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _is_floating(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool) and math.isfinite(x)


def _told(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]" if _is_array(x) else repr(x)[:60]
