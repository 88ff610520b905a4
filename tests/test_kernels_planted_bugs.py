"""The suite of the kernels finds what it is there for: mistakes made on purpose, each by one of its two modes."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import Case, check

from pallas_kernels.paged_attention.tpu import chunks, decode

DECODES = Case(rows=((300, 1), (600, 1)), kv_heads=1)
MIXED = Case(rows=((300, 30), (40, 1)), kv_heads=1)


@pytest.fixture(autouse=True)
def _fresh():
    """A mistake may leave the interpreter's memory and the traces behind."""
    yield
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()


def _found(case, modes=("tpu, eager", "tpu, on_wait")):
    for mode in modes:
        try:
            check(mode, case)
        except Exception:
            return True
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    return False


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
