"""Sampled requests through `generate_batch`: what a seed promises, and that company changes nothing.

A request's tokens depend on weights, prompt, its sampling settings and its seed, and on nothing else (invariant 4).
"""

import dataclasses

import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.sampling import derive_seed
from cbjax.testing import tiny_llama

VOCAB = 258
PROMPT = [72, 101, 108, 108, 111]
OTHERS = [[9, 8, 7], [200] * 11, [5], [33, 44, 55, 66], [1, 2], [250, 3]]
SEEDED = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.0, seed=42)
UNSEEDED = dataclasses.replace(SEEDED, seed=None)


def batching(**settings):
    pool = {"block_size": 4, "num_blocks": 64, "max_blocks_per_request": 64}
    # Calls repeat their prompts, and every one is to be computed.
    step = {"max_batch_tokens": 64, "max_requests_per_batch": 8, "allow_block_sharing": False}
    return ContinuousBatchingConfig(**(pool | step | {"return_logprobs": True, "compilation_cache": False} | settings))


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def generate(lm, prompts, generation, **settings):
    outputs = list(lm.generate_batch(prompts, generation, batching(**settings)).values())
    assert all(output.status == RequestStatus.FINISHED for output in outputs), [output.error for output in outputs]
    return outputs


def tokens_of(outputs):
    return [output.generated_tokens for output in outputs]


@pytest.fixture(scope="module")
def alone(lm):
    """The request of B24 in a call of its own."""
    (output,) = generate(lm, [PROMPT], SEEDED)
    return output.generated_tokens


# B24: a seed.


def test_b24_the_same_tokens_in_a_second_call(lm, alone):
    assert tokens_of(generate(lm, [PROMPT], SEEDED)) == [alone]


@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.parametrize("mates", [UNSEEDED, dataclasses.replace(SEEDED, seed=7), GenerationConfig(max_new_tokens=12)])
def test_b24_the_same_tokens_with_mates_in_any_row(lm, alone, row, mates):
    prompts, configs = list(OTHERS), [mates] * len(OTHERS)
    prompts.insert(row, PROMPT)
    configs.insert(row, SEEDED)
    outputs = generate(lm, prompts, configs)
    assert outputs[row].generated_tokens == alone


def test_b24_the_same_tokens_when_it_starts_late(lm, alone):
    # Eight rows: the request waits until one of the eight before it has ended.
    configs = [dataclasses.replace(UNSEEDED, max_new_tokens=n) for n in (20, 20, 4, 20, 20, 20, 20, 20)]
    outputs = generate(lm, [[1, 2, 3]] * 8 + [PROMPT], [*configs, SEEDED])
    assert outputs[8].generated_tokens == alone
    assert lm.summary.steps["mixed"] == 2, "the prompts of the first eight in one step, the last in a later one"


def test_b24_two_rows_of_the_same_seed_and_prompt_agree_and_of_another_seed_differ(lm, alone):
    other = dataclasses.replace(SEEDED, seed=43)
    assert tokens_of(generate(lm, [PROMPT] * 3, [SEEDED, SEEDED, other]))[:2] == [alone, alone]
    assert lm.last_outputs.popitem()[1].generated_tokens != alone


def test_b24_every_bit_of_a_seed_counts(lm):
    seeds = [0, 1, 1 << 32, (1 << 64) - 1, 1 << 63]
    outputs = generate(lm, [PROMPT] * 5, [dataclasses.replace(SEEDED, seed=seed) for seed in seeds])
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 5


# Requests without a seed of their own.


def test_unseeded_requests_of_one_prompt_differ_from_each_other(lm):
    outputs = generate(lm, [PROMPT] * 4, UNSEEDED)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 4


def test_unseeded_requests_differ_from_call_to_call(lm):
    assert tokens_of(generate(lm, [PROMPT], UNSEEDED)) != tokens_of(generate(lm, [PROMPT], UNSEEDED))


def test_a_seed_of_the_batching_config_makes_a_call_reproducible(lm):
    first = tokens_of(generate(lm, [PROMPT] * 3, UNSEEDED, seed=5))
    assert len({tuple(tokens) for tokens in first}) == 3
    assert tokens_of(generate(lm, [PROMPT] * 3, UNSEEDED, seed=5)) == first
    assert tokens_of(generate(lm, [PROMPT] * 3, UNSEEDED, seed=6)) != first
    # The request's place in the call decides, so a prefix of the call gives a prefix of the answers.
    assert tokens_of(generate(lm, [PROMPT] * 2, UNSEEDED, seed=5)) == first[:2]


def test_the_derived_seed_is_the_documented_one(lm):
    expected = [dataclasses.replace(SEEDED, seed=derive_seed(5, index)) for index in range(3)]
    assert tokens_of(generate(lm, [PROMPT] * 3, UNSEEDED, seed=5)) == tokens_of(generate(lm, [PROMPT] * 3, expected))


def test_bad_prompts_do_not_shift_the_seeds_of_those_behind_them(lm):
    first = tokens_of(generate(lm, [[1], PROMPT], UNSEEDED, seed=5))
    outputs = list(lm.generate_batch([[], PROMPT], UNSEEDED, batching(seed=5)).values())
    assert outputs[1].generated_tokens == first[1]


# B21 and settings.


@pytest.mark.parametrize("top_k", [-1, 0, None, VOCAB - 1, VOCAB, VOCAB + 1, 10**7])
def test_b21_top_k_off_or_beyond_the_vocabulary_keeps_every_token(lm, alone, top_k):
    (output,) = generate(lm, [PROMPT], dataclasses.replace(SEEDED, top_k=top_k))
    if top_k == VOCAB - 1:  # one token is cut, which changes no draw by much
        assert len(set(output.generated_tokens)) > 1
    else:
        assert output.generated_tokens == alone


def test_b21_one_batch_of_greedy_and_every_kind_of_top_k(lm):
    kinds = [GenerationConfig(max_new_tokens=12)]
    kinds += [dataclasses.replace(SEEDED, top_k=top_k) for top_k in (-1, 0, 1, 64, VOCAB - 1, VOCAB, 10**7)]
    together = tokens_of(generate(lm, [PROMPT] * len(kinds), kinds))
    assert together == [tokens_of(generate(lm, [PROMPT], kind))[0] for kind in kinds]
    assert together[1] == together[2] == together[6] == together[7] != together[0]
    assert together[3] == together[0], "top_k=1 leaves the most likely token"


def test_b21_a_hot_request_does_not_repeat_itself(lm):
    hot = GenerationConfig(max_new_tokens=200, do_sample=True, temperature=50.0, top_k=0, seed=1)
    (output,) = generate(lm, [[1]], hot)
    assert len(set(output.generated_tokens)) > 80  # of 258, almost evenly drawn


def test_b22_a_temperature_of_zero_or_nearly_is_greedy_and_none_is_one(lm, alone):
    settings = [{"temperature": t} for t in (0, 0.0, 1e-9, 1e-7, None)]
    configs = [GenerationConfig(max_new_tokens=12, do_sample=True, seed=42, **kind) for kind in settings]
    greedy = tokens_of(generate(lm, [PROMPT], GenerationConfig(max_new_tokens=12)))[0]
    assert tokens_of(generate(lm, [PROMPT] * 5, configs)) == [greedy] * 4 + [alone]


def test_logprobs_are_those_of_the_distribution_drawn_from(lm):
    config = dataclasses.replace(SEEDED, temperature=0.7, top_k=5)
    (output,) = generate(lm, [PROMPT], config)
    tokens = np.zeros(32, np.int32)
    tokens[: len(PROMPT) + 12] = PROMPT + output.generated_tokens
    logits = np.asarray(lm(tokens))[len(PROMPT) - 1 :][:12] / 0.7
    logits[logits < np.sort(logits, axis=1)[:, -5:-4]] = -np.inf
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(output.logprobs, expected[np.arange(12), output.generated_tokens], rtol=0, atol=1e-4)


# Invariant 4.


def mixed_requests():
    """24 requests of mixed lengths and settings, all with seeds."""
    rng = np.random.default_rng(3)
    prompts, configs = [], []
    for index in range(24):
        prompts.append(rng.integers(VOCAB, size=rng.integers(1, 30)).tolist())
        settings = [
            {},
            {"do_sample": True},
            {"temperature": float(rng.uniform(0.3, 2.0))},
            {"temperature": 1.5, "top_k": int(rng.integers(2, 300))},
            {"top_p": float(rng.uniform(0.2, 0.95))},
            {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        ][index % 6]
        configs.append(GenerationConfig(max_new_tokens=int(rng.integers(1, 14)), seed=index * 7919, **settings))
    return prompts, configs


@pytest.fixture(scope="module")
def solo(lm):
    """Each request alone in a pool much larger than it needs, with its whole prompt in one step."""
    prompts, configs = mixed_requests()
    return [generate(lm, [prompt], config)[0] for prompt, config in zip(prompts, configs, strict=True)]


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("budget", [9, 64])
def test_invariant_4_mixed_sampling_in_a_tight_pool_equals_each_request_alone(lm, solo, budget, scheduler_type):
    # 8 rows of up to 42 cells want 88 blocks of 4 at worst; the largest alone needs 11.
    tight = {"num_blocks": 14, "safety_margin": 0.0, "max_blocks_per_request": 64}
    prompts, configs = mixed_requests()
    outputs = generate(lm, prompts, configs, max_batch_tokens=budget, scheduler_type=scheduler_type, **tight)
    assert sum(output.num_soft_resets for output in outputs) > 0
    for output, expected in zip(outputs, solo, strict=True):
        assert output.generated_tokens == expected.generated_tokens
        np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert lm.session.engine.state.pool.num_free == 14
