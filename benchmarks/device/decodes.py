"""Decode calls of one shape, many in one dispatch, as the layers of a model are: what bandwidth is measured with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a program is compiled for.

    Attributes:
      rows: of the batch, each with one new token.
      block_size: of the store.
      longest: tokens that a row's table holds.
      calls: in one dispatch.
      heads, kv_heads, head_dim: of the model.
    """

    rows: int
    block_size: int
    longest: int
    calls: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def layout(self, tokens: int) -> gpu.GpuLayout:
        """Of a store for so many tokens."""
        return gpu.GpuLayout(
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=tokens // self.block_size,
        )


def trace(shape: Shape, pool_tokens: int, interpret: Any) -> jax.stages.Lowered:
    """`shape.calls` calls, one after the other, each over the next of `sets` parts of the store.

    Its arguments are (q, kv), k, table, contexts, sets and the blocks of a set; the first are donated, and its result
    takes their place. The queries of a call are the outputs of the one before. The plan is made once, as for a step.
    """
    layout = shape.layout(pool_tokens)
    sizes = gpu.GpuSizes(multiprocessors=2, decode_programs=1) if interpret else gpu.GpuSizes()
    rows = shape.rows

    def calls(carry, k, table, contexts, sets, set_blocks):
        plan = gpu.plan_step(
            table, jnp.arange(rows, dtype=jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32), contexts,
            jnp.int32(rows), num_tokens=rows, block_size=layout.block_size, kv_heads=shape.kv_heads,
            group=shape.heads // shape.kv_heads, single_token_rows=True, sizes=sizes,
        )  # fmt: skip

        def call(index, carry):
            q, kv = carry
            # A store that is larger than the cache, gone through in turns, is read from memory each time.
            ahead = jax.lax.rem(index, sets) * set_blocks
            here = dataclasses.replace(plan, table=plan.table + ahead, token_block=plan.token_block + ahead)
            return gpu.attend_planned(q, k, k, kv, here, layout, sizes=sizes, interpret=interpret)

        return jax.lax.fori_loop(0, shape.calls, call, carry)

    def array(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    q = array(rows, shape.heads, shape.head_dim, dtype=jnp.bfloat16)
    k = array(rows, shape.kv_heads, shape.head_dim, dtype=jnp.bfloat16)
    table = array(rows + 1, shape.longest // shape.block_size)
    jitted = jax.jit(calls, donate_argnums=0)
    return jitted.lower((q, array(*layout.shape, dtype=layout.dtype)), k, table, array(rows), array(), array())


def arguments(shape: Shape, context: int, pool_tokens: int) -> tuple[np.ndarray, ...]:
    """What comes behind (q, kv) and k: rows of the same context, whose blocks lie in random order.

    Raises:
      ValueError: the store is too small for it.
    """
    blocks = context // shape.block_size
    set_blocks, num_blocks = shape.rows * blocks, pool_tokens // shape.block_size
    if set_blocks > num_blocks:
        raise ValueError(f"{shape.rows} rows of {context} tokens need {set_blocks} blocks; there are {num_blocks}")
    table = np.zeros((shape.rows + 1, shape.longest // shape.block_size), np.int32)
    order = np.random.default_rng(0).permutation(set_blocks).astype(np.int32)
    table[: shape.rows, :blocks] = order.reshape(shape.rows, blocks)
    contexts = np.full(shape.rows, context, np.int32)
    return table, contexts, np.int32(num_blocks // set_blocks), np.int32(set_blocks)


def random_store(layout: gpu.GpuLayout) -> jax.Array:
    """A store of random numbers, which repeat after some blocks, so that making it takes no memory beside it."""
    blocks, *rest = layout.shape
    few = min(blocks, 64)
    some = jax.random.normal(jax.random.key(0), (few, *rest), layout.dtype)

    @jax.jit
    def fill(some: jax.Array) -> jax.Array:
        whole = jnp.broadcast_to(some[None], (-(-blocks // few), *some.shape))
        return whole.reshape(-1, *rest)[:blocks]

    return fill(some)
