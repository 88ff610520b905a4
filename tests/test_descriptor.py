"""The batch descriptor: padding is exact, fresh, and as abstract as it says."""

from dataclasses import fields, replace

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from machines import make_batch, make_config, make_request

from cbjax.descriptor import BatchDescriptor, Bucket, abstract, build, pack, packed_shape, unpack, unpad
from cbjax.ladder import make_ladder
from cbjax.scheduler import MAX_WINDOW, Batch, add, initial_state, schedule

NUM_SLOTS = 40


def leaves(descriptor: BatchDescriptor) -> dict[str, np.ndarray]:
    return {f.name: getattr(descriptor, f.name) for f in fields(descriptor)}


ones = st.lists(st.just(1), min_size=1, max_size=20)
batches = st.one_of(
    st.builds(make_batch, ones, window=st.integers(1, MAX_WINDOW)),
    st.builds(make_batch, st.lists(st.integers(1, 12), min_size=1, max_size=20)),
)
ladders = st.tuples(st.integers(20, 40), st.integers(20, 300)).map(
    lambda sizes: make_ladder(max_rows=sizes[0], max_batch_tokens=sizes[1])
)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(batch=batches, ladder=ladders)
def test_unpad_undoes_build_for_every_bucket_that_fits(batch: Batch, ladder) -> None:
    for bucket in ladder.buckets:
        fits = batch.num_rows <= bucket.rows and batch.num_tokens <= bucket.tokens
        fits &= batch.window == 1 if bucket.kind == "mixed" else set(batch.count.tolist()) == {1}
        assert bucket.fits(batch) == fits
        if not fits:
            with pytest.raises(ValueError, match="do not fit the bucket"):
                build(batch, bucket, NUM_SLOTS)
            continue
        descriptor = build(batch, bucket, NUM_SLOTS)
        back = unpad(descriptor)
        assert back == batch
        for f in fields(Batch):
            ours, theirs = getattr(back, f.name), getattr(batch, f.name)
            assert type(ours) is type(theirs), f.name
            assert np.asarray(ours).dtype == np.asarray(theirs).dtype, f.name


def test_batches_are_equal_only_if_everything_is() -> None:
    batch = make_batch([3, 1, 2])
    assert batch == make_batch([3, 1, 2])
    for f in fields(Batch):
        value = getattr(batch, f.name)
        other = ~value if np.asarray(value).dtype == bool else value + np.asarray(value).dtype.type(1)
        assert replace(batch, **{f.name: other}) != batch


def test_padding_rows_are_empty_and_name_the_trash_slot() -> None:
    descriptor = build(make_batch([5, 1, 7]), Bucket(kind="mixed", tokens=32, rows=8), NUM_SLOTS)
    assert int(descriptor.num_rows) == 3
    assert descriptor.q_start.tolist() == [0, 5, 6, 13, 13, 13, 13, 13, 13]
    assert descriptor.slot[3:].tolist() == [NUM_SLOTS] * 5
    assert (descriptor.slot[:3] < NUM_SLOTS).all()
    assert not descriptor.tokens[13:].any()
    assert descriptor.tokens[:13].all()
    for name in ("context_len", "carried", "emits", "output_index", "draws", "uid", "incarnation"):
        assert not getattr(descriptor, name)[3:].any(), name
    assert not descriptor.words[:, 3:].any()
    assert (descriptor.eos[:, 3:] == -1).all()


def test_context_is_what_the_row_holds_once_the_step_has_written() -> None:
    batch = make_batch([5, 1, 7])
    descriptor = build(batch, Bucket(kind="mixed", tokens=16, rows=4), NUM_SLOTS)
    assert descriptor.context_len[:3].tolist() == (batch.start + batch.count).tolist()


def test_token_i_of_a_decode_bucket_is_row_i() -> None:
    descriptor = build(make_batch([1, 1, 1]), Bucket(kind="decode", tokens=8, rows=8), NUM_SLOTS)
    assert descriptor.q_start[:4].tolist() == [0, 1, 2, 3]
    assert len(descriptor.tokens) == len(descriptor.slot) == 8


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [
        ([1, 1, 1], Bucket(kind="decode", tokens=2, rows=2)),
        ([2], Bucket(kind="decode", tokens=8, rows=8)),
        ([20, 13], Bucket(kind="mixed", tokens=32, rows=8)),
        ([1] * 9, Bucket(kind="mixed", tokens=32, rows=8)),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_numbers(counts: list[int], bucket: Bucket) -> None:
    with pytest.raises(ValueError) as error:
        build(make_batch(counts), bucket, NUM_SLOTS)
    assert f"{len(counts)} rows with {sum(counts)} tokens" in str(error.value)
    assert str(bucket) in str(error.value)


def test_every_leaf_is_fresh() -> None:
    """jit on CPU may read NumPy arguments in place, so no leaf is another step's or the scheduler's."""
    state = add(initial_state(make_config()), make_request(0, 64, 3))
    plan, after = schedule(state)
    bucket = Bucket(kind="mixed", tokens=64, rows=8)  # exactly full in tokens: nothing to pad there
    first, second = (leaves(build(plan.batch, bucket, 8)) for _ in range(2))
    others = [getattr(plan.batch, f.name) for f in fields(Batch)]
    for a_state in (state, after):
        others += [a_state.rows, a_state.tail, a_state.words, a_state.eos]
        others += [record.history for record in a_state.records if record]
    for name, leaf in first.items():
        assert not any(np.shares_memory(leaf, other) for other in (*others, *second.values())), name
        assert not any(np.shares_memory(leaf, other) for key, other in first.items() if key != name), name
        assert leaf.base is None, name
    full = build(make_batch([1] * 8), Bucket(kind="decode", tokens=8, rows=8), 8)
    assert all(leaf.base is None for leaf in leaves(full).values())


@pytest.mark.parametrize("bucket", make_ladder(max_rows=20, max_batch_tokens=100).buckets, ids=str)
def test_abstract_has_the_tree_shapes_and_dtypes_of_build(bucket: Bucket) -> None:
    concrete, shapes = build(make_batch([1, 1]), bucket, NUM_SLOTS), abstract(bucket, 2)
    assert jax.tree.structure(concrete) == jax.tree.structure(shapes)
    for a, b in zip(jax.tree.leaves(concrete), jax.tree.leaves(shapes), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("bucket", make_ladder(max_rows=20, max_batch_tokens=100).buckets, ids=str)
def test_a_descriptor_comes_out_of_its_one_array_as_it_went_in(bucket: Bucket) -> None:
    rows = min(3, bucket.rows)
    batch = make_batch([1] * rows)
    words = np.array([[0xFFFFFFFF, 0x80000000, 1][:rows], [0, 0x7FFFFFFF, 0xDEADBEEF][:rows]], np.uint32)
    descriptor = build(replace(batch, words=words), bucket, NUM_SLOTS)
    packed, shape = pack(descriptor), packed_shape(bucket, 2)
    assert (packed.shape, packed.dtype) == (shape.shape, shape.dtype)
    assert packed.base is None
    back = jax.jit(lambda packed: unpack(packed, bucket, 2))(packed)
    for name, leaf in leaves(descriptor).items():
        got = np.asarray(getattr(back, name))
        assert got.dtype == leaf.dtype, name
        np.testing.assert_array_equal(got, leaf, err_msg=name)
