"""The suite of the kernels finds what it is there for: mistakes made on purpose, each by one of its two modes."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import Case, check

from pallas_kernels.paged_attention.gpu import attend, merge, ring
from pallas_kernels.paged_attention.tpu import chunks, decode

DECODES = Case(rows=((300, 1), (600, 1)), kv_heads=1)
MIXED = Case(rows=((300, 30), (40, 1)), kv_heads=1)


@pytest.fixture(autouse=True)
def _fresh():
    """A mistake may leave the interpreter's memory and the traces behind."""
    yield
    pltpu.reset_tpu_interpret_mode_state()
    reset_gpu_interpret_mode_state()
    jax.clear_caches()


def _found(case, modes=("tpu, eager", "tpu, on_wait")):
    for mode in modes:
        try:
            check(mode, case)
        except Exception:
            return True
        finally:
            pltpu.reset_tpu_interpret_mode_state()
            reset_gpu_interpret_mode_state()
    return False


def _found_on_gpu(case):
    return _found(case, ("gpu",))


@pytest.mark.parametrize("case", [DECODES, MIXED], ids=["decode", "varlen"])
def test_a_missing_wait_is_found(monkeypatch, case):
    monkeypatch.setattr(chunks.ChunkBuffers, "wait", lambda self, *_: None)
    assert _found(case)


def test_a_chunk_read_from_the_wrong_buffer_is_found(monkeypatch):
    right = chunks.ChunkBuffers.keys_and_values
    monkeypatch.setattr(
        chunks.ChunkBuffers,
        "keys_and_values",
        lambda self, head, parity, tokens, dtype: right(self, head, 1 - parity, tokens, dtype),
    )
    assert _found(DECODES)


def test_a_block_of_someone_else_is_found(monkeypatch):
    right = chunks.ChunkBuffers.start
    monkeypatch.setattr(
        chunks.ChunkBuffers,
        "start",
        lambda self, span, chunk, ids_parity, parity: right(self, span, chunk, 1 - ids_parity, parity),
    )
    assert _found(DECODES)


def test_a_buffer_that_keeps_the_numbers_of_others_is_found(monkeypatch):
    monkeypatch.setattr(chunks.ChunkBuffers, "clear", lambda self, *_: None)
    assert _found(DECODES)


def test_a_slab_that_is_not_waited_for_at_the_end_is_found(monkeypatch):
    monkeypatch.setattr(decode._Rows, "end", lambda self: None)
    assert _found(DECODES)


def test_without_a_mistake_nothing_is_found():
    assert not _found(DECODES)
    assert not _found(MIXED)


ON_GPU = {"decode": Case(rows=((500, 1), (90, 1)), kv_heads=2), "varlen": Case(rows=((300, 80),), kv_heads=1)}
of_gpu = pytest.mark.parametrize("case", ON_GPU.values(), ids=ON_GPU)


@of_gpu
def test_a_tile_that_is_not_waited_for_is_found(monkeypatch, case):
    monkeypatch.setattr(ring.Ring, "_until_there", lambda self, *_: None)
    assert _found_on_gpu(case)


@of_gpu
def test_a_tile_that_is_written_over_while_it_is_read_is_found(monkeypatch, case):
    monkeypatch.setattr(attend, "MOST_STAGES", 2)
    monkeypatch.setattr(ring.Ring, "_until_free", lambda self, *_: None)
    assert _found_on_gpu(case)


@of_gpu
def test_a_tile_read_from_the_wrong_place_is_found(monkeypatch, case):
    right = ring.Ring._stage
    monkeypatch.setattr(
        ring.Ring, "_stage", lambda self, buffers, place: right(self, buffers, jax.lax.rem(place + 1, self.stages))
    )
    assert _found_on_gpu(case)


@of_gpu
def test_a_block_beside_the_right_one_is_found(monkeypatch, case):
    right = ring.Ring._block
    monkeypatch.setattr(
        ring.Ring, "_block", lambda self, table, slot, span, at: right(self, table, slot, span, jnp.maximum(at - 16, 0))
    )
    assert _found_on_gpu(case)


@of_gpu
def test_values_that_nobody_wrote_are_found(monkeypatch, case):
    monkeypatch.setattr(ring.Ring, "_seen", lambda self, matrix, *_: matrix)
    assert _found_on_gpu(case)


def test_outputs_that_are_not_handed_over_are_found(monkeypatch):
    """To the copy engine. What the matrix unit reads too early, the interpreter does not see."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert _found_on_gpu(ON_GPU["varlen"])


def test_an_item_that_is_left_out_of_the_mean_is_found(monkeypatch):
    monkeypatch.setattr(merge, "TOGETHER", 1)
    right = jax.lax.fori_loop
    monkeypatch.setattr(merge.lax, "fori_loop", lambda low, high, *rest: right(low, jnp.minimum(high, 1), *rest))
    assert _found_on_gpu(ON_GPU["decode"])


@of_gpu
def test_without_a_mistake_nothing_is_found_in_gpu_kernels(case):
    assert not _found_on_gpu(case)
