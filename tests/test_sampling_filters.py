"""temperature, top_k, top_p and the draw against a float64 reference that sorts."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sampling_reference import distribution, draw

from cbjax.sampling import SamplingParams
from cbjax.sampling.cutoff import NUM_CANDIDATES, Rows, cutoff
from cbjax.sampling.lanes import to_blocks
from cbjax.sampling.sample import sample

jitted = jax.jit(sample)

ROWS = 64
KINDS = ("dense", "wide", "narrow", "ties", "bfloat16", "two values", "equal", "peaked", "banned", "shifted")
TOP_K = (None, 0, -1, 1, 2, 3, 50, 63, 64, 65, 66, 127, 128, 129, 700, 10**7)
TOP_P = (None, 1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-3, 1e-30)
TEMPERATURES = (None, 1, 0.7, 0.1, 0.01, 1.5, 10.0)


def random_logits(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    normal = rng.normal(size=vocab)
    values = {
        "dense": normal * 3,
        "wide": normal * 30,
        "narrow": normal * 1e-3,
        "ties": np.round(normal * 2),
        "bfloat16": (normal * 4 + 10).astype(ml_dtypes.bfloat16),
        "two values": np.where(normal > 1, 2.0, -1.0),
        "equal": np.full(vocab, -3.5),
        "peaked": normal + 12 * (rng.random(vocab) < 5 / vocab),
        "banned": np.where(rng.random(vocab) < 0.7, -np.inf, normal),
        "shifted": normal * 2 + rng.choice([-300.0, 300.0]),
    }[kind].astype(np.float32)
    values[rng.integers(vocab)] = max(values.max(), -3.5)  # "banned" never bans all
    return values


def random_batch(vocab: int, rng: np.random.Generator) -> tuple[np.ndarray, list[SamplingParams], np.ndarray]:
    logits = np.stack([random_logits(KINDS[row % len(KINDS)], vocab, rng) for row in range(ROWS)])
    params = [
        SamplingParams(
            do_sample=True,
            temperature=rng.choice(TEMPERATURES),
            top_k=rng.choice(TOP_K),
            top_p=rng.choice(TOP_P),
            seed=int(rng.integers(2**63)),
            logprobs=True,
        )
        for _ in range(ROWS)
    ]
    return logits, params, rng.integers(0, 5000, ROWS).astype(np.int32)


@partial(jax.jit, static_argnames="vocab")
def cut_of(*fields: jax.Array, vocab: int) -> jax.Array:
    return cutoff(Rows(*fields), vocab)


def kept_by(cut: jax.Array, logits: np.ndarray) -> np.ndarray:
    return logits >= np.asarray(cut)[:, None]


@pytest.mark.parametrize(("vocab", "batches"), [(3, 5), (128, 12), (300, 12), (3001, 12)])
def test_kept_sets_tokens_and_logprobs_equal_the_sorting_reference(vocab, batches):
    # 3001 tokens are more leaves than candidates; 3001 and 300 are no multiples of a block.
    rng = np.random.default_rng(vocab)
    sure = 0
    for _ in range(batches):
        logits, params, index = random_batch(vocab, rng)
        words = np.stack([one.pack() for one in params], axis=1)
        tokens, logprobs, finite = map(np.asarray, jitted(logits, words, index))
        assert finite.all()
        for row in range(ROWS):
            expected = distribution(logits[row], params[row])
            if expected.margin < 1e-5:
                continue
            probability = expected.probabilities[tokens[row]]
            context = f"{KINDS[row % len(KINDS)]}, {params[row]}"
            assert probability > 0, context
            assert logprobs[row] == pytest.approx(np.log(probability), abs=3e-5, rel=1e-5), context
            token, margin = draw(expected.probabilities, params[row].seed, int(index[row]))
            if margin > 1e-5:
                assert tokens[row] == token, context
                sure += 1
    assert sure > 0.8 * batches * ROWS


@pytest.mark.parametrize("vocab", [128, 3001])
def test_cut_is_the_kept_set_of_the_reference(vocab):
    rng = np.random.default_rng(vocab + 1)
    checked = searched = 0
    for _ in range(8):
        logits, params, _ = random_batch(vocab, rng)
        top_k = [one.top_k if one.top_k not in (None, 0, -1) and one.top_k < vocab else 0 for one in params]
        top_p = [1.0 if one.top_p is None else one.top_p for one in params]
        scale = [1.0 / (one.temperature or 1.0) for one in params]
        settings = np.asarray([scale, top_k, top_p], np.float32)
        cut = cut_of(to_blocks(jnp.asarray(logits)), logits.max(1), *settings, vocab=vocab)
        for row, kept in enumerate(kept_by(cut, logits)):
            expected = distribution(logits[row], params[row])
            if expected.margin > 1e-5:
                # A token so unlikely that its float64 probability underflows may be kept or not.
                possible = (logits[row].astype(np.float64) - logits[row].max()) * scale[row] > -700
                np.testing.assert_array_equal(kept & possible, expected.kept & possible, f"{params[row]}")
                checked += 1
                searched += expected.kept.sum() > NUM_CANDIDATES
    assert checked > 400
    assert searched > 50


@pytest.mark.parametrize("top_p", [1.0, 0.999999])
def test_top_k_keeps_every_token_that_ties_with_the_last(top_p):
    # Row k has k - 1 distinct logits above 350 equal ones, and 50 below.
    counts = (1, 40, 64, 65, 66, 100)
    logits = np.zeros((len(counts), 499), np.float32)
    logits[:, 200:250] = -1.0
    for row, top_k in enumerate(counts):
        logits[row, : top_k - 1] = np.arange(top_k - 1, 0, -1) / 100
    fields = (logits.max(1), np.ones(len(counts)), np.array(counts), np.full(len(counts), top_p))
    cut = cut_of(to_blocks(jnp.asarray(logits)), *(field.astype(np.float32) for field in fields), vocab=499)
    np.testing.assert_array_equal(cut, 0.0)


def test_top_p_keeps_every_token_that_ties_with_the_last_and_never_none():
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.1, 0.1]], np.float32))
    for top_p, count in [(1e-30, 1), (0.39, 1), (0.41, 3), (0.59, 3), (0.79, 3), (0.81, 5), (0.99, 5)]:
        params = SamplingParams(do_sample=True, top_p=top_p)
        indices = np.arange(400, dtype=np.int32)
        many = np.repeat(logits, 400, axis=0)
        tokens = jitted(many, np.repeat(params.pack()[:, None], 400, axis=1), indices).tokens
        assert set(np.asarray(tokens).tolist()) == set(range(count)), top_p
