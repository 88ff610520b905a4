"""The batch descriptor: a plan's batch padded to one bucket, as the jitted step takes it.

A bucket fixes every shape, so the set of compiled programs is known beforehand. Padding is exact: `unpad(build(batch,
bucket, num_slots)) == batch` for every bucket that fits. Padding rows are empty and name the trash slot `num_slots`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from cbjax.scheduler import Batch
from cbjax.scheduler import Bucket as Bucket

# np.ndarray as built, jax.Array inside the step, jax.ShapeDtypeStruct when abstract.
type Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """One padded step. NumPy leaves, fresh for each step: jit on CPU may read them in place.

    Attributes:
      tokens: i32[tokens], input ids; 0 where the slot's last output is the input, and in padding.
      q_start: i32[rows + 1], row r computes tokens `q_start[r]:q_start[r + 1]`.
      context_len: i32[rows], KV cells of the row once this step has written; 0 in padding.
      slot: i32[rows].
      num_rows: i32[], rows that are not padding.
      carried, emits: bool[rows].
      output_index: i32[rows].
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
        array = np.full((*values.shape[:-1], size), fill, values.dtype)
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
        words=padded(batch.words),
        uid=padded(batch.uid),
        incarnation=padded(batch.incarnation),
    )


def unpad(descriptor: BatchDescriptor) -> Batch:
    """The batch a descriptor was built from."""
    rows = int(descriptor.num_rows)
    count = np.diff(descriptor.q_start)[:rows]
    same = {f.name for f in fields(Batch)} & {f.name for f in fields(BatchDescriptor)} - {"tokens"}
    return Batch(
        start=descriptor.context_len[:rows] - count,
        count=count,
        tokens=descriptor.tokens[: descriptor.q_start[rows]],
        **{name: getattr(descriptor, name)[..., :rows] for name in same},
    )


def abstract(bucket: Bucket, num_words: int) -> BatchDescriptor:
    """The descriptor's shapes and dtypes, to compile a bucket's program with nothing to run."""

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
        **{name: leaf(np.int32, rows) for name in ("context_len", "slot", "output_index", "uid", "incarnation")},
    )
