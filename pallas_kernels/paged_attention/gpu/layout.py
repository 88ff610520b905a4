"""How keys and values lie in a GPU's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

WIDTHS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """One layer's store, `[num_blocks + 2, planes, block_size, width]`: block by block, a matrix for each head.

    Plane h holds the keys of head h, plane `num_kv_heads + h` its values. A plane of a block is one piece of memory of
    the form that the copy engine tiles and the matrix unit takes, so each of a head's fetches is one copy.

    Attributes:
      num_kv_heads, head_dim: of the model.
      block_size: tokens per block, one of `BLOCK_SIZES`.
      num_blocks: blocks that can be handed out; two more belong to nobody.
      dtype: of the store, one of `KV_DTYPES`.

    Raises:
      ValueError, NotImplementedError: a size that the kernels have no form for.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16

    def __post_init__(self) -> None:
        dtype = jnp.dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        for name in ("num_kv_heads", "head_dim", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES} for the GPU kernels; got {self.block_size}")
        if dtype.name not in KV_DTYPES:
            raise NotImplementedError(f"the GPU kernels store {', '.join(KV_DTYPES)}; got {dtype.name}")
        if self.head_dim > WIDTHS[-1]:
            raise NotImplementedError(
                f"the GPU kernels take heads of at most {WIDTHS[-1]}; got head_dim {self.head_dim}"
            )
        if self.planes > 256:  # a copy's box is at most this long
            raise NotImplementedError(f"the GPU kernels take at most 128 kv heads; got {self.num_kv_heads}")

    @property
    def planes(self) -> int:
        """Matrices of a block."""
        return 2 * self.num_kv_heads

    @property
    def width(self) -> int:
        """Columns of a matrix, of which the first `head_dim` are used."""
        return next(width for width in WIDTHS if width >= self.head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer's array."""
        return (self.num_blocks + 2, self.planes, self.block_size, self.width)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, keys, values and padding."""
        return self.planes * self.width * jnp.dtype(self.dtype).itemsize

    @property
    def padding(self) -> float:
        """Share of the store that holds neither keys nor values."""
        return 1 - self.head_dim / self.width

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's array, the reserved blocks included."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def join(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """[tokens, planes, width] of k and v [tokens, num_kv_heads, head_dim], in their dtype; padding is 0."""
        return pad_columns(jnp.concatenate([k, v], axis=1), self.width)


def pad_columns(x: jax.Array, width: int) -> jax.Array:
    """x [..., columns] with zeros behind, [..., width]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def to_layout(kv: jax.Array, layout: GpuLayout) -> jax.Array:
    """The store of a layout from one in the plain form [2, kv_heads, num_blocks + 2, block_size, head_dim]."""
    return pad_columns(jnp.concatenate(list(kv)).swapaxes(0, 1), layout.width)


def from_layout(kv: jax.Array, layout: GpuLayout) -> jax.Array:
    """The plain form [2, kv_heads, num_blocks + 2, block_size, head_dim] of a store in a layout."""
    blocks, _, size, _ = kv.shape
    planes = kv[..., : layout.head_dim].swapaxes(0, 1)
    return planes.reshape(2, layout.num_kv_heads, blocks, size, layout.head_dim)
