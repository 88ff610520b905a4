"""The batch descriptor: a plan's batch padded to one bucket, as the jitted step takes it.

A bucket fixes every shape, so the set of compiled programs is known beforehand. Padding is exact: `unpad(build(batch,
bucket, num_slots)) == batch` for every bucket that fits. Padding rows are empty and name the trash slot `num_slots`.

A program takes the descriptor as one array of integers (`pack`, `unpack`): each array on its own would cost as much as
the whole to hand over, which is eight microseconds on a CPU and a transfer elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cbjax.scheduler import NUM_EOS_IDS, Batch
from cbjax.scheduler import Bucket as Bucket

_PER_ROW = ("context_len", "slot", "output_index", "draws", "uid", "incarnation")
# np.ndarray as built, jax.Array inside the step, jax.ShapeDtypeStruct when abstract.
type Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """One padded step or window of steps.

    Attributes:
      tokens: i32[tokens], input ids; 0 where the slot's last output is the input, and in padding.
      q_start: i32[rows + 1], row r computes tokens `q_start[r]:q_start[r + 1]`.
      context_len: i32[rows], KV cells of the row once this step has written; 0 in padding.
      slot: i32[rows].
      num_rows: i32[], rows that are not padding.
      carried, emits: bool[rows].
      output_index: i32[rows], of the (first) token that is sampled.
      draws: i32[rows], tokens sampled at most.
      window: i32[], steps.
      eos: i32[ids, rows], -1 where there are fewer.
      words: u32[words, rows].
      uid, incarnation: i32[rows], for the reader; the step does not use them.
    """

    tokens: Leaf
    q_start: Leaf
    context_len: Leaf
    slot: Leaf
    num_rows: Leaf
    carried: Leaf
    emits: Leaf
    output_index: Leaf
    draws: Leaf
    window: Leaf
    eos: Leaf
    words: Leaf
    uid: Leaf
    incarnation: Leaf


def build(batch: Batch, bucket: Bucket, num_slots: int) -> BatchDescriptor:
    """Pads a batch to a bucket.

    Raises:
      ValueError: it does not fit.
    """
    if not bucket.fits(batch):
        raise ValueError(f"{batch.num_rows} rows with {batch.num_tokens} tokens do not fit the bucket {bucket}")
    rows = batch.num_rows
    q_start = np.full(bucket.rows + 1, batch.num_tokens, np.int32)
    q_start[0] = 0
    np.cumsum(batch.count, out=q_start[1 : rows + 1])

    def padded(values: np.ndarray, size: int = bucket.rows, fill: int = 0) -> np.ndarray:
        shape = (*values.shape[:-1], size)
        array = np.full(shape, fill, values.dtype) if fill else np.zeros(shape, values.dtype)
        array[..., : values.shape[-1]] = values
        return array

    return BatchDescriptor(
        tokens=padded(batch.tokens, bucket.tokens),
        q_start=q_start,
        context_len=padded(batch.start + batch.count),
        slot=padded(batch.slot, fill=num_slots),
        num_rows=np.array(rows, np.int32),
        carried=padded(batch.carried),
        emits=padded(batch.emits),
        output_index=padded(batch.output_index),
        draws=padded(batch.draws),
        window=np.array(batch.window, np.int32),
        eos=padded(batch.eos, fill=-1),
        words=padded(batch.words),
        uid=padded(batch.uid),
        incarnation=padded(batch.incarnation),
    )


def unpad(descriptor: BatchDescriptor) -> Batch:
    """The batch a descriptor was built from."""
    rows = int(descriptor.num_rows)
    count = np.diff(descriptor.q_start)[:rows]
    same = {f.name for f in fields(Batch)} & {f.name for f in fields(BatchDescriptor)} - {"tokens", "window"}
    return Batch(
        start=descriptor.context_len[:rows] - count,
        count=count,
        tokens=descriptor.tokens[: descriptor.q_start[rows]],
        window=int(descriptor.window),
        **{name: getattr(descriptor, name)[..., :rows] for name in same},
    )


def pack(descriptor: BatchDescriptor) -> np.ndarray:
    """i32[entries], everything in the descriptor. Fresh for each step: a program on CPU may read it in place."""
    leaves = [getattr(descriptor, name).ravel() for name in _NAMES]
    return np.concatenate(leaves, dtype=np.int32, casting="unsafe")  # from bool, and bit for bit from uint32


def unpack(packed: jax.Array, bucket: Bucket, num_words: int) -> BatchDescriptor:
    """The descriptor that was packed, inside a program."""
    shapes, leaves, end = abstract(bucket, num_words), {}, 0
    for name in _NAMES:
        leaf = getattr(shapes, name)
        start, end = end, end + math.prod(leaf.shape)
        part = packed[start:end].reshape(leaf.shape)
        leaves[name] = part != 0 if leaf.dtype == np.bool_ else jax.lax.bitcast_convert_type(part, leaf.dtype)
    return BatchDescriptor(**leaves)


def packed_shape(bucket: Bucket, num_words: int) -> jax.ShapeDtypeStruct:
    """Of `pack`'s array, to compile a bucket's program with nothing to run."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(bucket, num_words)))
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def abstract(bucket: Bucket, num_words: int) -> BatchDescriptor:
    """The descriptor's shapes and dtypes."""

    def leaf(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = bucket.rows
    return BatchDescriptor(
        tokens=leaf(np.int32, bucket.tokens),
        q_start=leaf(np.int32, rows + 1),
        num_rows=leaf(np.int32),
        carried=leaf(np.bool_, rows),
        emits=leaf(np.bool_, rows),
        words=leaf(np.uint32, num_words, rows),
        window=leaf(np.int32),
        eos=leaf(np.int32, NUM_EOS_IDS, rows),
        **{name: leaf(np.int32, rows) for name in _PER_ROW},
    )


_NAMES = tuple(f.name for f in fields(BatchDescriptor))
