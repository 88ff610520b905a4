"""The probe of `batch_invariant=True`: a model whose bits depend on the batch is caught, what differs is left out."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from machines import make_batch
from schedules import different, make_jobs, run_alone, run_together

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.descriptor import Bucket
from cbjax.invariance import InvarianceError
from cbjax.invariance.probe import arrangements, make_probe, whole
from cbjax.invariance.prove import _Bench, _write
from cbjax.ladder import make_ladder
from cbjax.machine import MachineFacts
from cbjax.models.products import ProductForm, contract_last, product_form
from cbjax.resolve import ModelFacts, resolve
from cbjax.session import Session
from cbjax.testing import tiny_llama

GREEDY = GenerationConfig(max_new_tokens=3, eos_token_id=-1)
CONFIG = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=128,
    max_blocks_per_request=24,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    batch_invariant=True,
    compilation_cache=False,
)
LADDER = make_ladder(max_batch_tokens=64, max_rows=8)
MACHINE = MachineFacts(platform="cpu", device="made up", free_bytes=1 << 34, source="a test")
MODEL = ModelFacts(block_bytes_per_token=256, token_bytes=4096, row_bytes=4096, max_positions=256)
SLIGHTLY = jnp.float32(1 + 2**-20)


class Meddled:
    """A model of two layers, one of which somebody changes by a millionth."""

    def __init__(self, model, change, layer):
        self.model, self.change, self.layer = model, change, layer

    def hidden(self, tokens, positions, attend):
        def attended(layer, q, k, v, **how):
            out = attend(layer, q, k, v, **how)
            return self.change(out) if layer == self.layer else out

        return self.model.hidden(tokens, positions, attended)

    def logits(self, hidden):
        return self.model.logits(hidden)


def meddled(change, *, layer: int) -> CausalLM:
    lm = tiny_llama()
    return CausalLM(lambda params: Meddled(lm.bind(params), change, layer), lm.params, max_positions=256)


def for_few_rows(x):
    return x * SLIGHTLY if x.shape[0] < 8 else x


def by_place_in_the_batch(x):
    places = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(places == 5, x * SLIGHTLY, x)


def by_what_the_batch_holds(x):
    return x * (1 + jnp.float32(1e-4) * jnp.mean(x))


def by_a_backend_that_only_tiles_tame(x):
    return x if product_form.value is ProductForm.TILES else for_few_rows(x)


def session_of(lm: CausalLM, **changes) -> Session:
    session = Session(lm, replace(CONFIG, **changes), WorkloadHints())
    session.warmup()
    return session


# What is left out, and how steps go on without it.


@pytest.fixture(scope="module")
def uneven():
    lm = meddled(for_few_rows, layer=1)  # the last, so that no keys and values differ
    yield lm
    lm.close()


def test_programs_that_differ_are_left_out_with_the_reason_and_larger_ones_take_their_steps(uneven) -> None:
    outputs = uneven.generate_batch([[1, 2, 3]], GREEDY, CONFIG)
    assert [len(output.generated_tokens) for output in outputs.values()] == [3]
    session = uneven.session
    assert session.proof.products is ProductForm.ROWS, "tiles, which do not help, are not worth their price"
    assert session.proof.differing.keys() == {LADDER.decode[0]}
    assert session.engine.ladder == session.resolved.ladder == LADDER.only({LADDER.decode[1], *LADDER.mixed})
    assert set(session.engine.stats.steps) == {LADDER.decode[1], LADDER.mixed[0]}
    report = session.resolved.report()
    assert "2 of 3 programs" in report
    assert "decode(2): another logprob after position" in report
    assert "programs: decode(8), mixed(64 tokens, 8 rows)" in report


def test_bits_are_equal_with_the_mode_where_they_are_not_without(uneven) -> None:
    jobs, found = make_jobs(8, vocab_size=258, longest=60, new_tokens=6), {}
    for mode in (True, False):
        uneven.generate_batch([[1, 2, 3]], GREEDY, replace(CONFIG, batch_invariant=mode))
        engine = uneven.session.engine
        found[mode] = different(run_together(engine, jobs, seed=1), run_alone(engine, jobs))
    assert not found[True]
    assert found[False]["logprobs"] > 0


def test_products_go_in_tiles_where_only_those_keep_the_bits() -> None:
    session = session_of(meddled(by_a_backend_that_only_tiles_tame, layer=0), max_requests_per_batch=2)
    assert (session.proof.products, session.proof.differing) == (ProductForm.TILES, {})
    assert "in tiles of 64 rows" in session.resolved.report()
    session.close()


@pytest.mark.parametrize(
    "change", [by_place_in_the_batch, pytest.param(by_what_the_batch_holds, marks=pytest.mark.slow)]
)
def test_a_model_that_no_program_makes_invariant_is_refused(change) -> None:
    lm, config = meddled(change, layer=0), replace(CONFIG, max_requests_per_batch=2)
    message = (
        r"mixed\(64 tokens, 2 rows\), which every step .* gives other bits .*: other keys or values in layer 1 at "
    )
    with pytest.raises(InvarianceError, match=message):
        lm.generate_batch([[1, 2, 3]], GREEDY, config, warmup=False)
    with pytest.raises(ValueError, match="1 rows with 3 tokens fit no bucket"):
        lm.session.engine.ladder.select(make_batch([3]))
    (output,) = lm.generate_batch([[1, 2, 3]], GREEDY, replace(config, batch_invariant=False)).values()
    assert len(output.generated_tokens) == 3
    lm.close()


def test_no_step_runs_before_the_proof() -> None:
    lm = tiny_llama()
    lm.generate_batch([[1, 2, 3]], GREEDY, CONFIG, warmup=False)
    assert lm.session.proof.differing == {}
    assert lm.summary.compiled == len(LADDER.buckets) + 1, "the ladder, and what writes block-table entries"
    session = lm.session
    lm.generate_batch([[1, 2], [3]], GREEDY, replace(CONFIG, return_logprobs=True))
    assert lm.session is session
    assert lm.summary.compiled == 0
    lm.generate_batch([[1, 2]], GREEDY, replace(CONFIG, batch_invariant=False))
    assert lm.session is not session, "other programs, so another session"
    assert "off: bits may depend" in lm.session.resolved.report()
    manager = lm.init_continuous_batching(GREEDY, CONFIG)
    manager.start()
    assert lm.session.proof is not None
    assert manager.stop()
    lm.close()


# What the probe shows a program.


@pytest.mark.parametrize(
    ("rows", "tokens", "num_blocks", "block_size"),
    [(64, 512, 512, 32), (64, 64, 512, 32), (8, 64, 64, 4), (1, 7, 1, 4), (2, 64, 3, 256), (16, 100, 40, 16)],
)
def test_every_step_of_the_probe_fits_and_together_they_cover_it(rows, tokens, num_blocks, block_size) -> None:
    config = replace(
        CONFIG,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_tokens=tokens,
        max_requests_per_batch=rows,
        max_blocks_per_request=None,
    )
    resolved = resolve(config, WorkloadHints(), MACHINE, MODEL)
    reference = resolved.ladder.mixed[-1]
    probe = make_probe(resolved.scheduler, reference, vocab_size=258, max_positions=256)
    assert probe.queries[-1] == len(probe.tokens) - 1
    steps = list(whole(probe, reference))
    cells = [p for pieces in steps for piece in pieces for p in range(piece.start, piece.start + piece.count)]
    assert set(cells) == set(range(len(probe.tokens)))
    answered = [piece.query for pieces in steps for piece in pieces if piece.query is not None]
    assert sorted(answered) == list(range(len(probe.queries)))
    for bucket in resolved.ladder.buckets:
        for number, pieces in enumerate(arrangements(probe, bucket)):
            assert bucket.fits(probe.batch(pieces, quiet_mates=number % 2 == 1))
            assert any(piece.query is not None for piece in pieces)


def test_a_pool_without_a_block_for_each_group_cannot_be_probed() -> None:
    scheduler = resolve(CONFIG, WorkloadHints(), MACHINE, MODEL).scheduler
    with pytest.raises(ValueError, match="num_blocks=128 is less than one block for each of 200 layer groups"):
        make_probe(replace(scheduler, windows=(None,) * 200), LADDER.mixed[0], vocab_size=9, max_positions=9)


# Products.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [ProductForm.ROWS, ProductForm.TILES])
def test_a_products_rows_have_the_same_bits_in_any_number(form, dtype) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((300, 576), (192, 576)))
    with product_form(form):
        right = np.asarray(contract_last(x, weight)).view(np.uint8)
        for rows in (2, 3, 8, 31, 64, 65, 128, 200):
            assert (np.asarray(contract_last(x[:rows], weight)).view(np.uint8) == right[:rows]).all(), rows


def test_a_product_in_tiles_is_the_product() -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.integers(-9, 9, size), jnp.float32) for size in ((70, 12), (5, 12)))
    with product_form(ProductForm.TILES):
        np.testing.assert_array_equal(contract_last(x, weight), np.asarray(x) @ np.asarray(weight).T)


def test_the_ladder_without_some_buckets_keeps_the_others_in_order() -> None:
    kept = LADDER.only({Bucket(kind="decode", tokens=8, rows=8), *LADDER.mixed})
    assert [bucket.rows for bucket in kept.decode] == [8]
    assert kept.mixed == LADDER.mixed
    assert kept.reachable_alone(5, 2) == (kept.decode[0], kept.mixed[0])


@pytest.mark.parametrize(("axis", "shape"), [(2, (2, 3, 5, 4, 8)), (0, (5, 6, 4, 8))], ids=["XLA's", "kernels'"])
def test_cells_are_compared_in_every_layout_of_the_store(axis, shape):
    arrays = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + number for number in range(2)]
    places = ((0, 0), (0, 1))
    cache = SimpleNamespace(
        kv=list(map(jnp.asarray, arrays)), block_axis=axis, block_size=4, groups=SimpleNamespace(places=places)
    )
    bench = _Bench(SimpleNamespace(cache=cache), SimpleNamespace(blocks=np.array([[3, 1]])))
    bench.cells = bench._read()
    np.testing.assert_array_equal(bench.cells[1], np.take(arrays[1], [3, 1], axis=axis))
    assert bench._cell_difference() == ""

    where = [0] * len(shape)
    where[axis], where[-2] = 1, 2  # block 1 is the second of the sequence's
    cache.kv[1] = cache.kv[1].at[tuple(where)].add(1)
    assert bench._cell_difference() == "other keys or values in layer 1 at position 6"
    cache.kv = _write(cache.kv, np.array([3, 1]), bench.cells, axis=axis)
    assert bench._cell_difference() == ""
