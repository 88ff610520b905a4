"""A row's logits are the same bits whatever the program: batch mates, bucket, chunking, block size, decode or prefill.

In float32 that holds for programs of 64 rows or more: fewer are multiplied in another order, for speed. The whole tiny
decoder runs over the paged store; every path computes logits of the same sequence and must agree with what the first
path gave for that position.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged_rows import Row, make_table, one_store, pack

from cbjax.attention import KVSpec, PagedAttend, prepare_batch
from cbjax.models import DecoderConfig, build, init_params

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
)
LENGTHS = (150, 170, 20)  # the sequence under test and two batch mates
PROMPT = 146


@partial(jax.jit, static_argnames=("graphdef", "spec", "single_token_rows"), donate_argnames="kv")
def run_step(graphdef, params, kv, tokens, positions, step, *, spec, single_token_rows):
    """Logits of each row's last token, and the stores."""
    batch = prepare_batch(
        *step,
        num_tokens=tokens.shape[0],
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        single_token_rows=single_token_rows,
    )
    model, attend = nnx.merge(graphdef, params), PagedAttend(kv, [batch], one_store(len(kv), spec))
    hidden = model.hidden(tokens, positions, attend)
    last = jnp.clip(step[2][1:] - 1, 0, tokens.shape[0] - 1)
    return model.logits(hidden[last]), attend.kv


class Server:
    """Three sequences in one store; each call runs one step, in a program of `min_rows` rows or more."""

    def __init__(self, config: DecoderConfig, dtype: str, block_size: int, seed: int, min_rows: int):
        self.min_rows = min_rows
        rng = np.random.default_rng(7)
        self.sequences = [rng.integers(0, config.vocab_size, length) for length in LENGTHS]
        num_blocks = sum(-(-length // block_size) for length in LENGTHS)
        self.spec = KVSpec(
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=dtype,
        )
        self.table = make_table(self.spec, list(LENGTHS), seed=seed, width=50)
        self.kv = [self.spec.zeros() for _ in range(config.num_layers)]
        self.lengths = [0] * len(LENGTHS)
        self.graphdef, self.params = build(config, dtype), init_params(config, dtype, seed=2)

    def step(self, work: dict[int, int], *, tokens: int, rows: int, decode: bool = False) -> dict[int, np.ndarray]:
        """Runs `work[slot]` more tokens of each slot; returns {position: logits} of slot 0, if it takes part."""
        tokens, rows = max(tokens, self.min_rows), max(rows, self.min_rows)
        flat, positions, packed = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), []
        at = 0
        for slot, count in work.items():
            start, self.lengths[slot] = self.lengths[slot], self.lengths[slot] + count
            flat[at : at + count] = self.sequences[slot][start : start + count]
            positions[at : at + count] = np.arange(start, start + count)
            packed.append(Row(slot=slot, count=count, context=start + count))
            at += count
        step = pack(self.table, packed, max_rows=rows, single_token_rows=decode)
        logits, self.kv = run_step(
            self.graphdef,
            self.params,
            self.kv,
            flat,
            positions,
            step.args,
            spec=self.spec,
            single_token_rows=decode,
        )
        return {self.lengths[0] - 1: np.asarray(logits)[list(work).index(0)]} if 0 in work else {}


def packed_alone_then_decode_in_the_smallest_bucket(server: Server) -> Iterator[dict[int, np.ndarray]]:
    yield server.step({0: PROMPT}, tokens=320, rows=4)
    for _ in range(PROMPT, LENGTHS[0]):
        yield server.step({0: 1}, tokens=2, rows=2, decode=True)


def packed_between_others_then_decode_in_a_wide_bucket(server: Server) -> Iterator[dict[int, np.ndarray]]:
    yield server.step({2: 9, 0: PROMPT, 1: 165}, tokens=320, rows=4)
    for _ in range(PROMPT, LENGTHS[0]):
        yield server.step({1: 1, 2: 1, 0: 1}, tokens=64, rows=64, decode=True)


def chunked_with_a_decoding_neighbour_then_decode_in_mixed_steps(
    server: Server,
) -> Iterator[dict[int, np.ndarray]]:
    server.step({1: 3}, tokens=64, rows=8)
    for chunk in (37, 27, 1, 31, 50):
        yield server.step({1: 1, 0: chunk}, tokens=64, rows=8)
    for _ in range(PROMPT, LENGTHS[0]):
        yield server.step({2: 2, 0: 1, 1: 4}, tokens=64, rows=8)


def decoded_from_the_first_token(server: Server) -> Iterator[dict[int, np.ndarray]]:
    server.step({2: 5, 1: 100}, tokens=320, rows=4)
    for _ in range(60):
        yield server.step({1: 1, 0: 1}, tokens=16, rows=16, decode=True)
    for _ in range(60, LENGTHS[0]):
        yield server.step({0: 1}, tokens=2, rows=2, decode=True)


PATHS = [
    packed_alone_then_decode_in_the_smallest_bucket,
    packed_between_others_then_decode_in_a_wide_bucket,
    chunked_with_a_decoding_neighbour_then_decode_in_mixed_steps,
    decoded_from_the_first_token,
]


def logits_by_path(config: DecoderConfig, dtype: str, block_sizes: tuple[int, ...], paths, min_rows: int):
    """Every (what computed it, position, logits)."""
    for block_size in block_sizes:
        for seed, path in enumerate(paths):
            for result in path(Server(config, dtype, block_size, seed, min_rows)):
                for position, logits in result.items():
                    assert np.isfinite(logits).all()
                    yield f"{path.__name__}, block_size {block_size}, position {position}", position, logits


def differences(
    dtype: str, block_sizes: tuple[int, ...], paths=PATHS, *, min_rows: int, atol: float = 0.0
) -> list[str]:
    """Whose logits are not those seen first for their position: not the same bits, or off by more than `atol`."""
    seen: dict[int, np.ndarray] = {}
    compared, wrong = 0, []
    for what, position, logits in logits_by_path(CONFIG, dtype, block_sizes, paths, min_rows):
        first = seen.setdefault(position, logits)
        compared += first is not logits
        if first.tobytes() != logits.tobytes() and not (atol and np.allclose(first, logits, rtol=0, atol=atol)):
            wrong.append(what)
    assert compared >= 4 * (len(block_sizes) - 1)
    return wrong


@pytest.mark.parametrize(("dtype", "min_rows"), [("float32", 64), ("bfloat16", 2)])
def test_logits_are_bit_equal_across_programs(dtype, min_rows):
    assert differences(dtype, (16,), min_rows=min_rows) == []


def test_float32_logits_of_programs_of_few_rows_are_within_rounding():
    assert differences("float32", (16,), min_rows=2, atol=2e-5) == []


def test_logits_are_bit_equal_across_block_sizes():
    assert differences("float32", (4, 16, 256), PATHS[2:3], min_rows=64) == []
