"""`num_return_sequences` through the API: calls, managers, bad input."""

import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.testing import tiny_llama

PROMPT = [72, 101, 108, 108, 111, 32, 119]
SAMPLED = GenerationConfig(max_new_tokens=8, temperature=1.0, num_return_sequences=4, eos_token_id=-1)


def batching(**settings) -> ContinuousBatchingConfig:
    pool = {"block_size": 4, "num_blocks": 64, "max_blocks_per_request": 64, "max_requests_per_batch": 4}
    rest = {"max_batch_tokens": 64, "seed": 1, "return_logprobs": True, "compilation_cache": False}
    return ContinuousBatchingConfig(**(pool | rest | settings))


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def tokens(outputs) -> dict[str, list[int]]:
    return {name: output.generated_tokens for name, output in outputs.items()}


def test_b25_continuations_follow_their_prompt_differ_and_come_again(lm) -> None:
    outputs = lm.generate_batch([PROMPT, [5, 6]], [SAMPLED, GenerationConfig(eos_token_id=-1)], batching())
    names = ["", "__child#1", "__child#2", "__child#3"]
    first = next(iter(outputs))
    assert list(outputs)[:4] == [first + name for name in names]
    assert len(outputs) == 5
    family = list(outputs.values())[:4]
    assert len({tuple(output.generated_tokens) for output in family}) == 4
    assert [output.continuation for output in family] == [0, 1, 2, 3]
    assert [output.prompt_ids for output in family] == [PROMPT] * 4
    assert [output.num_cached_tokens for output in family] == [0, 6, 6, 6]
    assert (lm.summary.prompt_tokens, lm.summary.generated_tokens) == (len(PROMPT) + 2, 4 * 8 + 20)
    again = lm.generate_batch([PROMPT], SAMPLED, batching())
    assert list(tokens(again).values()) == [output.generated_tokens for output in family]


def test_invariant_4_a_continuation_is_what_a_request_with_its_seed_would_be(lm) -> None:
    from cbjax.sampling import derive_seed

    seeded = GenerationConfig(max_new_tokens=8, temperature=1.0, num_return_sequences=3, seed=7, eos_token_id=-1)
    outputs = list(lm.generate_batch([PROMPT], seeded, batching()).values())
    seeds = [7, derive_seed(7, 1), derive_seed(7, 2)]
    alone = [GenerationConfig(max_new_tokens=8, temperature=1.0, seed=seed, eos_token_id=-1) for seed in seeds]
    solo = list(lm.generate_batch([PROMPT] * 3, alone, batching(allow_block_sharing=False)).values())
    assert [o.generated_tokens for o in outputs] == [o.generated_tokens for o in solo]


def test_the_seed_of_a_prompt_does_not_depend_on_continuations_of_those_before_it(lm) -> None:
    one = GenerationConfig(max_new_tokens=6, temperature=1.0, eos_token_id=-1)
    with_fork = lm.generate_batch([PROMPT, [9, 8]], [SAMPLED, one], batching())
    without = lm.generate_batch([PROMPT, [9, 8]], one, batching())
    assert list(tokens(with_fork).values())[-1] == list(tokens(without).values())[-1]


@pytest.mark.parametrize("count", [5, 12])
def test_b25_more_continuations_than_rows_complete(lm, count) -> None:
    config = GenerationConfig(max_new_tokens=4, temperature=1.0, num_return_sequences=count, eos_token_id=-1)
    outputs = lm.generate_batch([PROMPT, [1]], config, batching())
    assert [output.status for output in outputs.values()] == [RequestStatus.FINISHED] * 2 * count
    assert lm.session.engine.state.pool.num_free == 64


def test_one_bad_prompt_fails_with_all_its_continuations_and_no_other(lm) -> None:
    outputs = list(lm.generate_batch([[999], PROMPT], SAMPLED, batching()).values())
    assert [output.status for output in outputs] == [RequestStatus.FAILED] * 4 + [RequestStatus.FINISHED] * 4
    assert all("vocabulary" in output.error for output in outputs[:4])


def test_forks_compile_nothing_after_warm_up(lm) -> None:
    lm.generate_batch([[1]], GenerationConfig(), batching())
    lm.session.warmup()
    programs = dict(lm.session.device.programs)
    lm.session.device.strict = True
    outputs = lm.generate_batch([PROMPT] * 3, SAMPLED, batching())
    lm.session.device.strict = False
    assert lm.session.device.programs == programs
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) >= 9, "nobody was forked"


@pytest.mark.parametrize("value", [0, -1])
def test_fewer_than_one_is_refused(value) -> None:
    with pytest.raises(ValueError, match=f"num_return_sequences must be at least 1; got {value}"):
        GenerationConfig(num_return_sequences=value, temperature=1.0)


def test_more_than_anybody_can_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="num_return_sequences must be at most 10000; got 1000000"):
        GenerationConfig(num_return_sequences=10**6, temperature=1.0)


@pytest.mark.parametrize("settings", [{}, {"do_sample": False}, {"temperature": 0.0}])
def test_greedy_continuations_are_refused_since_they_would_all_be_the_same(settings) -> None:
    with pytest.raises(ValueError, match="num_return_sequences=2 greedy continuations"):
        GenerationConfig(num_return_sequences=2, **settings)


def test_a_stream_of_several_continuations_is_refused(lm) -> None:
    with pytest.raises(ValueError, match="stream yields one continuation; got num_return_sequences=4"):
        next(lm.stream(PROMPT, SAMPLED, batching()))
    lm.generate_batch([PROMPT], SAMPLED, batching())


def test_names_that_continuations_would_take_are_refused(lm) -> None:
    with pytest.raises(ValueError, match="more than once: 'a__child#1'"):
        lm.generate_batch([PROMPT, [1]], SAMPLED, batching(), request_ids=["a", "a__child#1"])


def test_a_manager_gives_every_continuation_its_result_and_cancels_one_alone(lm) -> None:
    expected = list(tokens(lm.generate_batch([PROMPT], SAMPLED, batching())).values())
    with lm.continuous_batching_context_manager(SAMPLED, batching()) as manager:
        name = manager.add_request(PROMPT)
        names = [name, *(f"{name}__child#{i}" for i in range(1, 4))]
        results = [manager.get_result(each, timeout=60) for each in names]
        assert [result.generated_tokens for result in results] == expected
        assert len(list(manager)) == 0
        long = GenerationConfig(max_new_tokens=200, temperature=1.0, num_return_sequences=3, eos_token_id=-1)
        other = manager.add_request(PROMPT, generation_config=long)
        manager.cancel_request(f"{other}__child#1")
        cancelled = manager.get_result(f"{other}__child#1", timeout=60)
        assert cancelled.status == RequestStatus.CANCELLED
        for each in (other, f"{other}__child#2"):
            assert len(manager.get_result(each, timeout=60).generated_tokens) == 200


def test_an_automatic_name_is_free_for_every_continuation(lm) -> None:
    with lm.continuous_batching_context_manager(SAMPLED, batching()) as manager:
        taken = int(manager.add_request(PROMPT).removeprefix("req_")) + 1
        manager.add_request([1, 2], f"req_{taken}__child#2", generation_config=GenerationConfig(eos_token_id=-1))
        assert manager.add_request(PROMPT) == f"req_{taken + 1}"


def test_the_cancel_of_the_first_before_the_start_leaves_the_prompt_shared_by_the_others(lm) -> None:
    manager = lm.init_continuous_batching(SAMPLED, batching(allow_block_sharing=False))
    name = manager.add_request(PROMPT)
    manager.cancel_request(name)
    manager.start()
    outputs = [manager.get_result(f"{name}__child#{i}", timeout=60) for i in range(1, 4)]
    manager.stop()
    assert [output.num_cached_tokens for output in outputs] == [0, 6, 6]


def test_what_is_shared_in_a_family_is_not_called_a_hit_of_the_cache(lm) -> None:
    lm.generate_batch([PROMPT], SAMPLED, batching(allow_block_sharing=False))
    assert lm.summary.cached_tokens == 0
    assert "prefix cache       0 prompt tokens found: allow_block_sharing is off" in str(lm.summary)
