"""What versions of jax name differently: the kernels run with those from 0.11.2 on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_TAKES_COST = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
_HAS_STORE = hasattr(plgpu, "store")


def kernel(body: Callable[..., None], *, cost_estimate: pl.CostEstimate, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel(body, cost_estimate=cost_estimate, **options)`; versions that take no estimate do without."""
    if _TAKES_COST:
        options["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, **options)


def store(ref: Any, value: jax.Array) -> None:
    """Writes a value to memory in the form that it has in registers, be it the best one for that or not."""
    if _HAS_STORE:
        plgpu.store(ref, value, optimized=False)
    else:
        # These versions look for the best way themselves, and take any.
        ref[...] = value
