"""The prefix cache on real models: warm equals cold, and what is found is told."""

import jax
import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.scheduler import BlockPool
from cbjax.testing import tiny_llama

SHARED = list(range(40, 61))
PROMPTS = [SHARED + [i] * (3 * i + 1) for i in range(5)]
GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)


def batching(**settings) -> ContinuousBatchingConfig:
    pool = {"block_size": 4, "num_blocks": 128, "max_blocks_per_request": 64, "max_requests_per_batch": 8}
    rest = {"max_batch_tokens": 64, "return_logprobs": True, "compilation_cache": False}
    return ContinuousBatchingConfig(**(pool | rest | settings))


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


@pytest.fixture(scope="module")
def cold(lm):
    """Every prompt on its own, all of it computed."""
    return [run(lm, [prompt], allow_block_sharing=False)[0] for prompt in PROMPTS]


def run(lm, prompts, generation=GREEDY, **settings):
    outputs = list(lm.generate_batch(prompts, generation, batching(**settings)).values())
    assert not [output.error for output in outputs if output.error]
    return outputs


def assert_found_nothing_old(outputs) -> None:
    """The first ones of a call find nothing; those admitted later may find what these computed."""
    assert [output.num_cached_tokens for output in outputs[:3]] == [0] * 3
    assert all(output.num_cached_tokens <= len(SHARED) for output in outputs)


def assert_equal(outputs, expected) -> None:
    assert [output.generated_tokens for output in outputs] == [output.generated_tokens for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.logprobs, other.logprobs, atol=1e-5)


def test_warm_prompts_give_what_cold_ones_give(lm, cold) -> None:
    first, second = run(lm, PROMPTS), run(lm, PROMPTS)
    assert_equal(first, cold)
    assert_equal(second, cold)
    assert [output.num_cached_tokens for output in second] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]
    assert lm.summary.cached_tokens == sum(output.num_cached_tokens for output in second)
    assert f"{lm.summary.cached_tokens} prompt tokens found" in str(lm.summary)


def test_invariant_3_nan_in_reserved_and_blank_blocks_changes_nothing_that_is_found(lm, cold) -> None:
    run(lm, PROMPTS)
    pool, cache = lm.session.engine.state.pool, lm.session.device.cache
    blank = np.append(pool.blank[: pool.num_blank], [128, 129])
    assert pool.num_cached > 0
    cache.kv = [array.at[:, :, blank].set(np.nan) for array in cache.kv]
    again = run(lm, PROMPTS)
    assert_equal(again, cold)
    assert all(output.num_cached_tokens for output in again)


def test_a_stream_that_is_closed_leaves_what_is_cached(lm, cold) -> None:
    run(lm, PROMPTS)
    cached = lm.session.engine.state.pool.num_cached
    stream = lm.stream(PROMPTS[-1], GREEDY, batching())
    assert next(stream).num_cached_tokens > 0
    stream.close()
    assert lm.session.engine.is_idle
    assert lm.session.engine.state.pool.num_cached >= cached
    again = run(lm, PROMPTS)
    assert_equal(again, cold)
    assert all(output.num_cached_tokens for output in again)


def test_b08_new_params_find_nothing_that_the_old_ones_computed(lm, cold) -> None:
    run(lm, PROMPTS)
    old = lm.params
    try:
        lm.params = jax.tree.map(lambda leaf: leaf * 1.5, old)
        other = run(lm, PROMPTS)
        assert_found_nothing_old(other)
        fresh = tiny_llama()
        fresh.params = lm.params
        assert_equal(other, run(fresh, PROMPTS, allow_block_sharing=False))
        fresh.close()
    finally:
        lm.params = old
    back = run(lm, PROMPTS)
    assert_found_nothing_old(back)
    assert_equal(back, cold)


def test_b08_params_that_were_changed_in_place_are_noticed(lm, cold) -> None:
    run(lm, PROMPTS)
    embedding = lm.params["embed"]["weight"]
    lm.params["embed"]["weight"] = embedding * 1.5
    try:
        assert_found_nothing_old(run(lm, PROMPTS))
    finally:
        lm.params["embed"]["weight"] = embedding
    assert_equal(run(lm, PROMPTS), cold)


def test_params_of_another_structure_are_refused_with_the_place_and_nothing_is_lost(lm, cold) -> None:
    """Weights go to the programs as a flat list, in which a renamed one could come to stand where another was."""
    run(lm, PROMPTS)
    layer = lm.params["layers"][0]["mlp"]
    layer["w1"] = layer.pop("gate")
    try:
        with pytest.raises(ValueError, match=r"at \['layers'\]\[0\]\['mlp'\]\['gate'\]\['weight'\] the old"):
            run(lm, PROMPTS)
    finally:
        layer["gate"] = layer.pop("w1")
    assert_equal(run(lm, PROMPTS), cold)


def test_b08_numpy_params_that_were_changed_in_place_are_never_trusted(lm, cold) -> None:
    old = lm.params
    lm.params = jax.tree.map(np.array, old)
    try:
        run(lm, PROMPTS)
        for leaf in jax.tree.leaves(lm.params):
            leaf *= 1.5
        changed = run(lm, PROMPTS)
        assert_found_nothing_old(changed)
        assert changed[0].generated_tokens != cold[0].generated_tokens
    finally:
        lm.params = old
    assert_equal(run(lm, PROMPTS), cold)


def test_b08_an_interrupt_while_the_cache_is_dropped_leaves_no_old_cache_under_new_params(
    lm, cold, monkeypatch
) -> None:
    run(lm, PROMPTS)
    old = lm.params
    other = tiny_llama(seed=5)

    def interrupted(pool):
        raise KeyboardInterrupt

    try:
        lm.params = other.params
        with monkeypatch.context() as patch:
            patch.setattr(BlockPool, "without_cache", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(lm, PROMPTS)
        assert_equal(run(lm, PROMPTS), run(other, PROMPTS, allow_block_sharing=False))
    finally:
        lm.params = old
        other.close()
    assert_equal(run(lm, PROMPTS), cold)


def test_params_changed_in_place_take_effect_at_the_next_call_and_not_within_one(lm, cold) -> None:
    embedding = lm.params["embed"]["weight"]
    stream = lm.stream(PROMPTS[0], GREEDY, batching())
    try:
        next(stream)
        lm.params["embed"]["weight"] = embedding * 1.5
        outputs = list(stream)
    finally:
        lm.params["embed"]["weight"] = embedding
    assert outputs[-1].generated_tokens == cold[0].generated_tokens


def test_a_warm_single_prompt_compiles_what_is_left_of_it_before_it_runs(lm) -> None:
    prompt = [*SHARED, *range(60, 120)]
    run(lm, [prompt], max_batch_tokens=512, num_blocks=127)
    run(lm, [prompt], max_batch_tokens=512, num_blocks=127)
    programs = dict(lm.session.device.programs)
    lm.session.device.strict = True
    (output,) = run(lm, [prompt], max_batch_tokens=512, num_blocks=127)
    assert output.num_cached_tokens == 80
    assert lm.session.device.programs == programs
    lm.session.device.strict = False


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"allow_block_sharing": False}, "allow_block_sharing is off"),
        ({"block_size": 64, "num_blocks": 32}, "no prompt is longer than a block (34 of 64 tokens)"),
    ],
)
def test_b49_that_nothing_can_be_found_is_said_with_its_reason(lm, settings, why) -> None:
    run(lm, PROMPTS, **settings)
    assert f"prefix cache       0 prompt tokens found: {why}" in str(lm.summary)


def test_b49_the_report_says_so_before_anything_runs(lm) -> None:
    run(lm, [[1, 2, 3]], block_size=256, num_blocks=None, max_blocks_per_request=None)
    (line,) = [line for line in lm.session.resolved.report().splitlines() if line.startswith("allow_block_sharing")]
    assert "no prompt will be found: 128 tokens at most, and only full blocks of 256" in line
