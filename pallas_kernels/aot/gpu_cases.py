"""The GPU kernels at the sizes of a model, as programs to compile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.gpu_program import GpuProgram
from pallas_kernels.aot.sizes import check_dtypes, check_sizes
from pallas_kernels.paged_attention.gpu import GpuLayout, paged_attention

OPS = ("paged_attention",)
PHASES = ("decode", "prefill")


def build(
    *,
    op: str = "paged_attention",
    phase: str = "decode",
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 128,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    rows: int = 64,
    context: int = 8192,
    new_tokens: int = 512,
    window: int | None = None,
    soft_cap: float | None = None,
) -> GpuProgram:
    """A layer's attention with the update of its store; counts in tokens, rows and heads.

    Args:
      phase: in decode each row has one new token, in prefill `new_tokens`; of that, all kernels are compiled.
      context: of each row, the new tokens included.

    Raises:
      ValueError, NotImplementedError: there is no such kernel.
    """
    if op not in OPS or phase not in PHASES:
        raise NotImplementedError(
            f"GPU kernels are {', '.join(OPS)} in the phases {', '.join(PHASES)}; got {op} in {phase}"
        )
    check_sizes(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, rows=rows, context=context,
        new_tokens=new_tokens, window=window, soft_cap=soft_cap,
    )  # fmt: skip
    check_dtypes(dtype=dtype, kv_dtype=kv_dtype or dtype)
    if phase == "prefill" and new_tokens > context:
        raise ValueError(f"a row has 1 to context ({context}) new tokens; got {new_tokens}")
    blocks = -(-context // block_size)
    layout = GpuLayout(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=rows * blocks,
        dtype=kv_dtype or dtype,
    )
    tokens = rows if phase == "decode" else rows * new_tokens

    def function(*arrays: Any) -> Any:
        scales = dict(zip(("k_scales", "v_scales"), arrays[9:], strict=False))
        return paged_attention(
            *arrays[:9], window=window, soft_cap=soft_cap, single_token_rows=phase == "decode", **scales
        )

    new = _array(tokens, kv_heads, head_dim, dtype=dtype)
    scales = (_array(kv_heads, dtype=jnp.float32),) * 2 if jnp.dtype(layout.dtype).itemsize == 1 else ()
    queries, store = _array(tokens, heads, head_dim, dtype=dtype), _array(*layout.shape, dtype=layout.dtype)
    indices = (_array(rows + 1, blocks), _array(rows), _array(rows + 1), _array(rows), _array())
    return GpuProgram(function=function, arguments=[queries, new, new, store, *indices, *scales], donate=[3])


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
