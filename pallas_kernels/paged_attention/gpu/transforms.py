"""How matrices lie in shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_BYTES = 128


def swizzled(dtype: jax.typing.DTypeLike, columns: int = SWIZZLE_BYTES) -> tuple[Any, ...]:
    """Tiles of 8 rows by 128 bytes, or as many as `columns` have; the matrix unit and the copy engine take them."""
    size = jnp.dtype(dtype).itemsize
    columns = min(SWIZZLE_BYTES // size, columns)
    # jax's own classes leave a method of their base out, which nothing calls.
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return (tiling, plgpu.SwizzleTransform(columns * size))  # pyright: ignore[reportAbstractUsage]
