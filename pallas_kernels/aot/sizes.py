"""Sizes that cases of both kinds of chips have in common, checked before a compiler is asked."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.checks import check_window


def check_sizes(*, heads: int, kv_heads: int, window: Any, soft_cap: float | None, **counts: int) -> None:
    """Raises ValueError for what a compiler would say less clearly; `counts` are at least 1, as are heads."""
    for name, count in {"heads": heads, "kv_heads": kv_heads, **counts}.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")
    if heads % kv_heads:
        raise ValueError(f"kv heads must divide query heads; got {kv_heads} and {heads}")
    check_window(window)
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be a positive, finite number; got {soft_cap}")


def check_dtypes(**dtypes: str) -> None:
    """Raises ValueError where one names no dtype."""
    for name, dtype in dtypes.items():
        try:
            jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"{name} must name a dtype; got {dtype!r}") from None
