"""The shape of one layer's KV store and the places in it that belong to nobody."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.paged_attention import KVLayout
    from pallas_kernels.paged_attention.gpu import GpuLayout

# head_major: [2, kv_heads, num_blocks + 2, block_size, head_dim], K then V, for gathers of XLA.
# tpu, gpu: a block is one piece of memory, as those kernels copy it (`KVLayout`, `GpuLayout`).
type LayoutName = Literal["head_major", "tpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """One layer's KV array, in the layout of the attention implementation that reads it.

    The two blocks after the `num_blocks` that an allocator hands out are reserved: padding reads the first and
    writes the second, and nothing that is in them can reach an output. `read_trash`, `sentinel` and `write_trash` are
    token indices into the flat pool (`block * block_size + offset`).

    Attributes:
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        block_size: tokens per block.
        num_blocks: blocks that can be handed out.
        dtype: dtype that keys and values are rounded to.
        layout: the order of the axes.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: jax.typing.DTypeLike = jnp.float32
    layout: LayoutName = "head_major"

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        dtype = jnp.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"dtype must be a floating dtype. Got {dtype}.")
        object.__setattr__(self, "dtype", dtype)
        if self.layout != "head_major":
            self.blocks  # noqa: B018 (raises where the kernels have no form for it)
            return
        slots = 2 * self.num_kv_heads * (self.num_blocks + 2) * self.block_size
        if slots >= 2**31:
            raise ValueError(
                "A layer's KV store is indexed by int32, so 2 * kv_heads * (num_blocks + 2) * block_size must stay "
                f"below 2**31. Got {slots}; lower num_blocks."
            )

    @property
    def blocks(self) -> "KVLayout | GpuLayout":
        """The kernels' own description of a store in their layout."""
        if self.layout == "gpu":
            from pallas_kernels.paged_attention.gpu import GpuLayout as Layout
        else:
            from pallas_kernels.paged_attention import KVLayout as Layout
        return Layout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            dtype=self.dtype,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer's array."""
        if self.layout != "head_major":
            return self.blocks.shape
        return (2, self.num_kv_heads, self.num_blocks + 2, self.block_size, self.head_dim)

    @property
    def block_axis(self) -> int:
        """The axis that block ids count."""
        return 2 if self.layout == "head_major" else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values together, with what the layout pads."""
        return self.layer_bytes // (self.num_blocks + 2)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's array, the reserved blocks included."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def read_trash(self) -> int:
        """Token index that padding reads: the first of block `num_blocks`."""
        return self.num_blocks * self.block_size

    @property
    def sentinel(self) -> int:
        """Token index that stands for what left a sliding window."""
        return self.read_trash + 1

    @property
    def write_trash(self) -> int:
        """Token index that padding writes: the first of block `num_blocks + 1`."""
        return (self.num_blocks + 1) * self.block_size

    def zeros(self) -> jax.Array:
        """A fresh array of one layer."""
        return jnp.zeros(self.shape, self.dtype)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one layer's array, without memory."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)
