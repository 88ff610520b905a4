"""`sample` as its callers see it (cases B15, B21, B22, B23, B24, B37): distribution, seeds, independence of rows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sampling_reference import distribution

from cbjax.sampling import SamplingParams
from cbjax.sampling.sample import Sampled, sample

jitted = jax.jit(sample)


# Few shapes, few compilations.
ROWS, VOCABS = (64, 512, 20_000), (128, 300)


def run(logits: np.ndarray, params: list[SamplingParams], output_index: object = 0) -> Sampled:
    """NumPy results of a batch; `output_index` is one for all rows, or one for each.

    The batch is filled up with idle rows and banned tokens, which changes nothing.
    """
    count, vocab = logits.shape
    rows = next(size for size in ROWS if size >= count) - count
    tokens = next(size for size in VOCABS if size >= vocab) - vocab
    filled = np.pad(logits.astype(np.float32), ((0, rows), (0, tokens)), constant_values=-np.inf)
    words = np.pad(np.stack([one.pack() for one in params], axis=1), ((0, 0), (0, rows)))
    index = np.pad(np.broadcast_to(np.asarray(output_index, np.int32), count), (0, rows))
    return Sampled(*(np.asarray(field)[:count] for field in jitted(filled, words, index)))


def run_exactly(logits: np.ndarray, params: list[SamplingParams], index: np.ndarray) -> Sampled:
    """NumPy results of a batch of just these rows and tokens."""
    return Sampled(*map(np.asarray, jitted(logits, np.stack([one.pack() for one in params], axis=1), index)))


def sampling(**settings) -> SamplingParams:
    return SamplingParams(do_sample=True, **settings)


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """Tokens i32[count] of output indices 0, 1, 2 ... for one row of logits."""
    return run(np.repeat(logits[None], count, axis=0), [params] * count, np.arange(count)).tokens


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[expected == 0].sum() == 0
    return float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


# 99.99% quantiles of chi-square.
QUANTILE = {4: 23.51, 7: 29.88, 63: 112.1, 299: 398.0}


def test_draws_over_output_indices_follow_the_distribution():
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2], np.float32)
    plain, filtered = sampling(seed=7), sampling(temperature=1.3, top_k=6, top_p=0.9, seed=11)
    assert chi_square(draws(logits, plain, 20_000), distribution(logits, plain).probabilities) < QUANTILE[7]
    expected = distribution(logits, filtered).probabilities
    assert (expected > 0).sum() == 5
    assert chi_square(draws(logits, filtered, 20_000), expected) < QUANTILE[4]


def test_draws_over_seeds_follow_the_distribution_across_blocks_of_tokens():
    logits = np.random.default_rng(3).normal(size=300).astype(np.float32) / 2
    params = [sampling(seed=seed * 2**32) for seed in range(20_000)]
    tokens = run(np.repeat(logits[None], 20_000, axis=0), params, 5).tokens
    assert chi_square(tokens, distribution(logits, params[0]).probabilities) < QUANTILE[299]


def test_successive_draws_are_independent():
    tokens = draws(np.zeros(8, np.float32), sampling(seed=1), 20_000).astype(np.int64)
    pairs = tokens[0::2] * 8 + tokens[1::2]
    assert chi_square(pairs, np.full(64, 1 / 64)) < QUANTILE[63]


def test_b21_top_k_off_or_beyond_the_vocabulary_keeps_all_in_one_batch_with_others():
    vocab = 128
    params = [
        SamplingParams(),
        *(sampling(temperature=1.0, top_k=k, seed=9) for k in (-1, 0, 64, 127, 128, 129, 10**7, None)),
    ]
    flat = np.zeros((len(params), vocab), np.float32)
    sharp = np.random.default_rng(0).normal(size=vocab).astype(np.float32) / 4
    seen = [set() for _ in params]
    for index in range(200):
        result = run(flat, params, index)
        assert result.finite.all()
        for tokens, token in zip(seen, result.tokens, strict=True):
            tokens.add(int(token))
    assert seen[0] == {0}
    assert all(len(tokens) > 50 for tokens in seen[1:])
    # Off in any of its spellings draws alike; 64 and 127 keep exactly so many distinct logits.
    for k in (-1, 0, 128, 129, 10**7):
        assert (draws(sharp, sampling(top_k=k), 400) == draws(sharp, sampling(), 400)).all()
    least = np.argsort(sharp)
    assert least[0] not in draws(sharp, sampling(top_k=127), 3000)
    assert not set(least[:64]) & set(draws(sharp, sampling(top_k=64), 3000).tolist())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_b22_tiny_temperatures_take_the_maximum_and_are_never_nan(dtype):
    rng = np.random.default_rng(4)
    row = np.linspace(-1e4, 1e4, 200)[rng.permutation(200)].astype(dtype).astype(np.float32)
    temperatures = [0, 0.0, 1e-7, 9.9e-7, 1e-6, 1.1e-6, 1e-5, 1e-4, 1e-3]
    params = [sampling(temperature=t, seed=i, logprobs=True) for i, t in enumerate(temperatures)]
    params += [sampling(temperature=1.0, seed=3, logprobs=True), sampling(temperature=None, seed=3, logprobs=True)]
    soft = rng.normal(size=200).astype(np.float32)
    logits = np.stack([row] * len(temperatures) + [soft, soft])
    for index in range(20):
        tokens, logprobs, finite = run(logits, params, index)
        assert finite.all()
        assert np.isfinite(logprobs).all()
        assert (row[tokens[: len(temperatures)]] == row.max()).all()
        assert tokens[-1] == tokens[-2]
        expected = distribution(soft, params[-1]).probabilities[tokens[-1]]
        assert logprobs[-1] == pytest.approx(np.log(expected), abs=1e-5)
    assert len(set(draws(soft, sampling(), 200).tolist())) > 50


def test_b22_temperature_may_be_as_large_as_float32_goes():
    logits = np.array([5.0, -np.inf, -5.0, 1e4], np.float32)
    tokens = draws(logits, sampling(temperature=3e38), 200)
    assert set(tokens.tolist()) == {0, 2, 3}


def test_b23_temperature_comes_before_top_p():
    logits = np.arange(4, dtype=np.float32)
    assert set(draws(logits, sampling(temperature=2.0, top_p=0.6), 300).tolist()) == {3, 2}
    assert set(draws(logits, sampling(temperature=1.0, top_p=0.6), 300).tolist()) == {3}


def test_b23_top_k_comes_before_top_p():
    # Of all four tokens 0.6 asks for two; of the two that top_k leaves, one has 0.62 already.
    logits = np.array([0.0, 1.0, 1.5, 2.0], np.float32)
    assert set(draws(logits, sampling(top_p=0.6), 300).tolist()) == {3, 2}
    assert set(draws(logits, sampling(top_k=2, top_p=0.6), 300).tolist()) == {3}


def test_b23_at_least_one_token_is_kept_and_greedy_ignores_filters():
    logits = np.random.default_rng(5).normal(size=300).astype(np.float32)
    best = logits.argmax()
    for params in (sampling(top_p=1e-30), sampling(top_k=1), sampling(temperature=50.0, top_k=1, top_p=1e-9)):
        assert (draws(logits, params, 50) == best).all()
    assert (draws(logits, SamplingParams(temperature=5.0, top_k=9, top_p=0.9), 50) == best).all()


def test_b24_a_draw_depends_on_seed_and_output_index_only():
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(8, 200)).astype(np.float32)
    logits[[0, 5]] = logits[2]
    mine = sampling(temperature=1.0, seed=42)
    alone = [run(logits[[2, 3]], [mine, SamplingParams()], index).tokens[0] for index in range(30)]
    others = [sampling(seed=int(seed)) for seed in rng.integers(0, 2**63, 8)]
    for index, token in enumerate(alone):
        batch = list(others)
        batch[0] = batch[5] = mine
        # The mates are at other places of their outputs, and arrive and leave.
        at = rng.integers(0, 1000, 8)
        at[[0, 5]] = index
        tokens = run(logits, batch, at).tokens
        assert tokens[0] == tokens[5] == token
    assert len(set(alone)) > 10
    other = [run(logits[[2, 3]], [sampling(seed=43), mine], index).tokens[0] for index in range(30)]
    assert sum(a == b for a, b in zip(alone, other, strict=True)) < 10
    high_half = [run(logits[[2, 3]], [sampling(seed=42 + 2**32), mine], index).tokens[0] for index in range(30)]
    assert sum(a == b for a, b in zip(alone, high_half, strict=True)) < 10


def test_b15_the_same_output_index_draws_the_same_token_again():
    logits = np.random.default_rng(7).normal(size=(1, 200)).astype(np.float32)
    first = [run(logits, [sampling(seed=1)], index).tokens[0] for index in (0, 1, 2, 3)]
    again = [run(logits, [sampling(seed=1)], index).tokens[0] for index in (0, 0, 1, 1, 2, 3)]
    assert again == [first[0], first[0], first[1], first[1], first[2], first[3]]


def mixed_batch(rows: int, vocab: int, rng: np.random.Generator) -> tuple[np.ndarray, list[SamplingParams], np.ndarray]:
    """Every way through the sampler at once: greedy, plain, few candidates, exact search, not finite."""
    spread = rng.choice([0.3, 2.0, 8.0], rows)[:, None]
    logits = (rng.normal(size=(rows, vocab)) * spread).astype(np.float32)
    logits[0, vocab // 2] = np.nan
    logits[1] = -np.inf
    logits[2] = np.round(logits[2])
    params = []
    for row in range(rows):
        filters = {
            "temperature": rng.choice([None, 0.0, 0.8, 1.2]),
            "top_k": rng.choice([None, 5, 50, 200, 1000]),
            "top_p": rng.choice([None, 0.3, 0.9, 0.99]),
        }
        params.append(SamplingParams(do_sample=row % 5 > 0, **filters, seed=row, logprobs=row % 3 > 0))
    return logits, params, rng.integers(0, 4000, rows).astype(np.int32)


def check_independence(vocab: int, sizes: tuple[int, ...], tries: int) -> None:
    rng = np.random.default_rng(vocab)
    logits, params, index = mixed_batch(64, vocab, rng)
    whole = run_exactly(logits, params, index)
    assert whole.finite.sum() == 62
    for size in sizes:
        for _ in range(tries):
            chosen = rng.permutation(64)[:size]
            part = run_exactly(logits[chosen], [params[row] for row in chosen], index[chosen])
            np.testing.assert_array_equal(part.tokens, whole.tokens[chosen])
            np.testing.assert_array_equal(part.logprobs.view(np.uint32), whole.logprobs[chosen].view(np.uint32))
            np.testing.assert_array_equal(part.finite, whole.finite[chosen])


def test_invariant_4_bits_of_a_row_do_not_depend_on_number_place_or_mates():
    check_independence(3001, (2, 5, 64), tries=8)


@pytest.mark.slow
def test_invariant_4_bits_of_a_row_at_the_size_of_a_real_vocabulary():
    check_independence(49_152, (2, 3, 8, 17, 32), tries=10)


def test_invariant_6_a_row_that_is_not_finite_is_flagged_and_disturbs_no_other():
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(8, 300)).astype(np.float32)
    params = [
        sampling(top_k=40, top_p=0.9, seed=row, logprobs=True) if row % 2 else SamplingParams(logprobs=True)
        for row in range(8)
    ]
    clean = run(logits, params, 3)
    assert clean.finite.all()
    for bad in (np.nan, -np.nan, np.inf):
        for place in (0, 1, 63, 64, 127, 128, 255, 298, 299):
            dirty = logits.copy()
            dirty[2, place] = dirty[5, place] = bad
            result = run(dirty, params, 3)
            np.testing.assert_array_equal(result.finite, [True, True, False, True, True, False, True, True])
            good = result.finite
            np.testing.assert_array_equal(result.tokens[good], clean.tokens[good])
            np.testing.assert_array_equal(result.logprobs[good], clean.logprobs[good])
            assert (result.tokens[~good] == 0).all()
            assert (result.logprobs[~good] == 0).all()


def test_invariant_6_a_row_without_any_possible_token_is_not_finite():
    logits = np.full((3, 300), -np.inf, np.float32)
    logits[1, 299] = -2.0
    for params in (SamplingParams(logprobs=True), sampling(top_k=70, top_p=0.5, logprobs=True)):
        result = run(logits, [params] * 3)
        np.testing.assert_array_equal(result.finite, [False, True, False])
        np.testing.assert_array_equal(result.tokens, [0, 299, 0])
        np.testing.assert_array_equal(result.logprobs, 0.0)


def test_banned_tokens_are_never_drawn():
    logits = np.where(np.arange(300) % 3 == 0, 0.0, -np.inf).astype(np.float32)
    for params in (sampling(), sampling(top_k=200), sampling(top_k=200, top_p=0.99), sampling(temperature=1e6)):
        assert (draws(logits, params, 300) % 3 == 0).all()


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros((4, 300), np.float32)
    logits[1, [130, 7, 299]] = 2.0
    logits[2, [299, 128]] = 2.0
    logits[3] = [-0.0] * 150 + [0.0] * 150
    np.testing.assert_array_equal(run(logits, [SamplingParams()] * 4).tokens, [0, 7, 128, 0])


def test_b37_logprob_is_of_the_distribution_drawn_from_and_raw_for_greedy():
    rng = np.random.default_rng(9)
    logits = rng.normal(size=8).astype(np.float32) * 2
    raw = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    params = [
        SamplingParams(logprobs=True),
        SamplingParams(temperature=0.6, logprobs=True),
        sampling(temperature=0.6, top_k=1, logprobs=True),
        sampling(temperature=0.6, logprobs=True),
        sampling(temperature=0.6, top_k=3, logprobs=True),
        sampling(temperature=0.6, top_k=3),
    ]
    for index in range(20):
        tokens, logprobs, _ = run(np.repeat(logits[None], 6, axis=0), params, index)
        np.testing.assert_allclose(logprobs[:2], raw.max(), atol=1e-6)
        assert logprobs[2] == 0
        for row in (3, 4):
            probability = distribution(logits, params[row]).probabilities[tokens[row]]
            assert logprobs[row] == pytest.approx(np.log(probability), abs=1e-6)
        assert logprobs[5] == 0
        assert tokens[5] == tokens[4]


def test_logprobs_of_all_tokens_sum_to_one():
    logits = np.random.default_rng(10).normal(size=8).astype(np.float32)
    result = run(np.repeat(logits[None], 2000, axis=0), [sampling(logprobs=True)] * 2000, np.arange(2000))
    by_token = dict(zip(result.tokens.tolist(), result.logprobs.tolist(), strict=True))
    assert sorted(by_token) == list(range(8))
    assert sum(np.exp(list(by_token.values()))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "words", "index", "error"),
    [
        (jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((6, 2), jnp.uint32), jnp.zeros(2, jnp.int32), TypeError),
        (jnp.zeros((2, 8)), jnp.zeros((6, 2), jnp.int32), jnp.zeros(2, jnp.int32), TypeError),
        (jnp.zeros((2, 8)), jnp.zeros((2, 6), jnp.uint32), jnp.zeros(2, jnp.int32), ValueError),
        (jnp.zeros((2, 8)), jnp.zeros((6, 2), jnp.uint32), jnp.zeros(3, jnp.int32), ValueError),
        (jnp.zeros(8), jnp.zeros((6, 1), jnp.uint32), jnp.zeros(1, jnp.int32), ValueError),
    ],
)
def test_arrays_that_do_not_fit_are_refused(logits, words, index, error):
    with pytest.raises(error, match="got"):
        sample(logits, words, index)
