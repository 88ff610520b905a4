"""How keys and values lie in a TPU's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)
KV_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One layer's store, `[num_blocks + 2, planes, block_size, lanes]`: block by block, a matrix for each head.

    A block is one piece of memory, so one copy fetches it for all heads. Within it a head's keys are a matrix that the
    matrix unit takes as it is: no row is picked out of another head's, and no pair is pulled apart. Heads wider than 64
    have a plane for the keys (0 to `num_kv_heads`) and one for the values (behind those). Narrower ones share a plane,
    keys in lanes 0 to 63 and values in lanes 64 to 127, and take half the memory that padding to 128 lanes would.

    Attributes:
      num_kv_heads, head_dim: of the model.
      block_size: tokens per block, one of `BLOCK_SIZES`.
      num_blocks: blocks that can be handed out; two more belong to nobody.
      dtype: of the store.

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
            raise ValueError(f"block_size must be one of {BLOCK_SIZES} for the TPU kernels; got {self.block_size}")
        if dtype.name not in KV_DTYPES:
            raise NotImplementedError(f"the TPU kernels store {', '.join(KV_DTYPES)}; got {dtype.name}")
        if self.head_dim > 2 * LANES:
            raise NotImplementedError(
                f"the TPU kernels take heads of at most {2 * LANES}; got head_dim {self.head_dim}"
            )

    @property
    def is_packed(self) -> bool:
        """Keys and values of a head share a plane."""
        return self.head_dim <= LANES // 2

    @property
    def planes(self) -> int:
        """Matrices of a block."""
        return self.num_kv_heads * (1 if self.is_packed else 2)

    @property
    def lanes(self) -> int:
        """Width of a matrix."""
        return LANES if self.is_packed else -(-self.head_dim // LANES) * LANES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer's array."""
        return (self.num_blocks + 2, self.planes, self.block_size, self.lanes)

    @property
    def slab(self) -> int:
        """Tokens of a block that are written together: the rows of one tile of the dtype."""
        return min(self.block_size, 32 // jnp.dtype(self.dtype).itemsize)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, keys, values and padding."""
        return self.planes * self.lanes * jnp.dtype(self.dtype).itemsize

    @property
    def padding(self) -> float:
        """Share of the store that holds neither keys nor values."""
        return 1 - 2 * self.num_kv_heads * self.head_dim / (self.planes * self.lanes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's array, the reserved blocks included."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def join(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """[tokens, planes, lanes] of k and v [tokens, num_kv_heads, head_dim], in their dtype; padding is 0."""
        if not self.is_packed:
            return pad_lanes(jnp.concatenate([k, v], axis=1), self.lanes)
        half = LANES // 2
        return jnp.concatenate([pad_lanes(k, half), pad_lanes(v, half)], axis=2)


def pad_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """x [..., width] with zeros behind, [..., lanes]."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])


def to_layout(kv: jax.Array, layout: KVLayout) -> jax.Array:
    """The store of a layout from one in the plain form [2, kv_heads, num_blocks + 2, block_size, head_dim]."""
    k, v = kv
    blocks, size = k.shape[1:3]
    joined = layout.join(*(x.transpose(1, 2, 0, 3).reshape(blocks * size, *x.shape[::3]) for x in (k, v)))
    return joined.reshape(blocks, size, layout.planes, layout.lanes).swapaxes(1, 2)


def from_layout(kv: jax.Array, layout: KVLayout) -> jax.Array:
    """The plain form [2, kv_heads, num_blocks + 2, block_size, head_dim] of a store in a layout."""
    heads, width, half = layout.num_kv_heads, layout.head_dim, LANES // 2
    if layout.is_packed:
        k, v = kv[..., :width], kv[..., half : half + width]
    else:
        k, v = kv[:, :heads, :, :width], kv[:, heads:, :, :width]
    return jnp.stack([k, v]).swapaxes(1, 2)
