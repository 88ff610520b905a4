"""Whole blocks out of the store, into it, and within it: three programs of one fixed size each, looped over more.

A block that left the store is a `Block`, so that each block of a copy can come back alone, in any order, and host
memory holds no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# One block of the store's arrays, [arrays, ...] for each shape among them, in order of first appearance; the other axes
# are a store array's (`KVSpec.shape`) without the one that block ids count.
type Block = tuple[jax.Array, ...] | tuple[np.ndarray, ...]

# A call moves as many blocks as hold this many tokens. Its temporaries are a copy or two of what it moves, so they are
# bounded in bytes whatever the block size, while a call costs about 0.1 ms: what moves for 256 tokens takes longer.
_CALL_TOKENS = 256
# With small blocks, arguments and compile time of the programs are the bound.
_MAX_CALL_BLOCKS = 16
# Calls between store and host memory that are waited for together: until a call has ended its blocks are on the device
# twice, and a long request has many.
CALLS_IN_FLIGHT = 4


def blocks_per_call(block_size: int) -> int:
    """Blocks that one call of each program moves, for blocks of this many tokens; at least one."""
    return min(max(_CALL_TOKENS // block_size, 1), _MAX_CALL_BLOCKS)


def gather_blocks(kv: Sequence[jax.Array], ids: jax.Array, *, axis: int) -> list[tuple[jax.Array, ...]]:
    """The blocks `ids` (i32[blocks]) of the store, which are counted along `axis`.

    `kv` must not be donated; padding reads block `num_blocks`.
    """
    parts = [array.at[_at(axis, ids)].get(mode="promise_in_bounds") for array in kv]
    # Else every block's output is compiled as a gather of its own from every array, which takes three times as long.
    parts = jax.lax.optimization_barrier(parts)
    shapes = _by_shape(kv)
    return [tuple(jnp.stack([parts[j][_at(axis, i)] for j in same]) for same in shapes) for i in range(ids.shape[0])]


def scatter_blocks(kv: Sequence[jax.Array], blocks: Sequence[Block], ids: jax.Array, *, axis: int) -> list[jax.Array]:
    """The store with `blocks` written to `ids` (i32[blocks]). Donate `kv`; padding writes block `num_blocks + 1`."""
    written = list(kv)
    for shape, same in enumerate(_by_shape(kv)):
        for place, j in enumerate(same):
            # Stacked per array: slices of one large stack take four times as long to compile.
            new = jnp.stack([block[shape][place] for block in blocks], axis=axis)
            written[j] = kv[j].at[_at(axis, ids)].set(new, mode="promise_in_bounds")
    return written


def copy_blocks(kv: Sequence[jax.Array], sources: jax.Array, destinations: jax.Array, *, axis: int) -> list[jax.Array]:
    """The store with blocks copied within it, i32[blocks] each; every source is read before anything is written.

    Donate `kv`; padding copies block `num_blocks` to `num_blocks + 1`.
    """
    read = [array.at[_at(axis, sources)].get(mode="promise_in_bounds") for array in kv]
    return [
        array.at[_at(axis, destinations)].set(blocks, mode="promise_in_bounds")
        for array, blocks in zip(kv, read, strict=True)
    ]


def lower_block_program(
    key: str, kv: Sequence[jax.ShapeDtypeStruct], ids: jax.ShapeDtypeStruct, axis: int
) -> jax.stages.Lowered:
    """One of the programs that move whole blocks ("gather", "scatter", "copy"), for a store and ids of these shapes."""
    gather, scatter, copy = (partial(move, axis=axis) for move in (gather_blocks, scatter_blocks, copy_blocks))
    if key == "gather":
        return jax.jit(gather).lower(kv, ids)
    if key == "scatter":
        return jax.jit(scatter, donate_argnums=0).lower(kv, jax.eval_shape(gather, kv, ids), ids)
    assert key == "copy", f"there is no program {key!r}"
    return jax.jit(copy, donate_argnums=0).lower(kv, ids, ids)


def _at(axis: int, ids: Any) -> tuple[Any, ...]:
    """An index of blocks."""
    return (slice(None),) * axis + (ids,)


def calls(ids: np.ndarray, size: int, *, padding: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Cuts ids (i32[blocks]) for programs of `size`: which of them a call takes, and a fresh i32[size] for it."""
    for first in range(0, len(ids), size):
        part = slice(first, min(first + size, len(ids)))
        call = np.full(size, padding, np.int32)
        call[: part.stop - first] = ids[part]
        yield part, call


def reads_first(sources: np.ndarray, destinations: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Orders copies (i32[copies] each) for calls of `size`, so that every source is read before it is overwritten.

    Yields:
      Indices of copies that can be cut into calls anywhere, since they overwrite nothing that they or later ones read;
      last those that change places all around, which only one call can do.
    """
    left = np.arange(len(sources))
    while len(left):
        overwrites = np.isin(destinations[left], sources[left])
        if overwrites.all():
            assert len(left) <= size, f"{len(left)} blocks change places all around, and a call copies {size}"
            yield left
            return
        yield left[~overwrites]
        left = left[overwrites]


def _by_shape(kv: Sequence[jax.Array]) -> list[list[int]]:
    """Indices of the arrays of each shape."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, array in enumerate(kv):
        found.setdefault(array.shape, []).append(index)
    return list(found.values())
