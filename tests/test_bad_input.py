"""Bad input is refused at the call that brings it, with the reason, and harms nothing else (invariant 6)."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.models import flatten, unflatten
from cbjax.sampling import SamplingParams
from cbjax.scheduler import SchedulerConfig, scheduler_named
from cbjax.testing import ByteTokenizer, HistoryHashDevice, solo_run, tiny_llama

PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 80, 64, 12, 80, 3], [1, 2]]
GREEDY = GenerationConfig(max_new_tokens=5, eos_token_id=-1)
VOCAB = 258


def batching(**settings):
    pool = {"block_size": 4, "num_blocks": 64, "max_blocks_per_request": 64}
    step = {"max_batch_tokens": 64, "max_requests_per_batch": 8}
    return ContinuousBatchingConfig(**(pool | step | {"return_logprobs": True, "compilation_cache": False} | settings))


@pytest.fixture(scope="module")
def lm():
    """Without a tokenizer."""
    model = tiny_llama()
    yield model
    model.close()


@pytest.fixture(scope="module")
def texted(lm):
    """The same weights with a tokenizer."""
    model = variant(lm, tokenizer=ByteTokenizer())
    yield model
    model.close()


@pytest.fixture(scope="module")
def short(lm):
    """The same weights with 32 positions."""
    model = variant(lm, max_positions=32)
    yield model
    model.close()


@pytest.fixture(scope="module")
def solo(lm):
    """Each of PROMPTS in a call of its own."""
    return [next(iter(lm.generate_batch([prompt], GREEDY, batching()).values())) for prompt in PROMPTS]


def variant(lm, **changes):
    """The same weights as another model."""
    return CausalLM(lm.bind, lm.params, **({"max_positions": lm.max_positions} | changes))


def assert_same(outputs, solo):
    for output, expected in zip(outputs, solo, strict=True):
        assert output.status == RequestStatus.FINISHED, output.error
        assert output.generated_tokens == expected.generated_tokens
        np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def check_fails_alone(lm, solo, bad, *messages, config=None, generation=GREEDY):
    """Runs `bad` among good prompts: it alone fails, for the reason in `messages`; returns its output."""
    configs = [GREEDY, generation, GREEDY, GREEDY, GREEDY]
    prompts = [PROMPTS[0], bad, *PROMPTS[1:]]
    outputs = list(lm.generate_batch(prompts, configs, config or batching()).values())
    refused = outputs.pop(1)
    assert (refused.status, refused.finish_reason) == (RequestStatus.FAILED, "failed")
    assert refused.generated_tokens == []
    for message in messages:
        assert message in refused.error
    assert_same(outputs, solo)
    assert lm.session.engine.is_idle
    assert lm.session.engine.state.pool.num_free == lm.session.resolved.scheduler.num_blocks
    return refused


# Prompts.


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int32), np.array([])], ids=["list", "tuple", "int", "float"])
def test_b29_an_empty_prompt_fails_alone(lm, solo, empty):
    refused = check_fails_alone(lm, solo, empty, "at least one token", "BOS")
    assert refused.prompt_ids == []


def test_b29_empty_text_is_the_bos_token_where_the_tokenizer_adds_one(texted):
    outputs = list(texted.generate_batch(["", [1, 2]], GREEDY, batching()).values())
    assert [output.prompt_ids for output in outputs] == [[256], [1, 2]]
    assert all(output.status == RequestStatus.FINISHED for output in outputs)


def test_b29_empty_text_without_bos_fails_alone(texted, solo, monkeypatch):
    monkeypatch.setattr(texted.tokenizer, "encode", lambda text: list(text.encode()))
    check_fails_alone(texted, solo, "", "at least one token")


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 191222, 2**31])
def test_b28_an_id_outside_the_vocabulary_fails_alone(lm, solo, bad):
    check_fails_alone(lm, solo, [3, bad, 4], str(VOCAB), str(bad))


@pytest.mark.parametrize(
    "bad",
    [
        ["5"],
        [None],
        [1, None],
        [1.0, 2.0],
        [float("nan")],
        [True, False],
        [3, 2**63],
        [3, 2**70],
        [[1, 2]],
        [[1], [2, 3]],
        np.array(5),
        np.array([[1, 2]]),
        b"bytes",
        None,
        5,
        1.5,
        {1, 2},
        {"role": "user", "content": "a message that is not in a list"},
        pytest.param(object(), id="an object"),
        np.array(["a"]),
    ],
    ids=repr,
)
def test_b28_what_is_no_prompt_fails_alone(lm, solo, bad):
    refused = check_fails_alone(lm, solo, bad)
    assert "prompt" in refused.error
    json.dumps(refused.prompt_ids)


@pytest.mark.parametrize("bad", ["text", [{"role": "user", "content": "hi"}]])
def test_text_without_a_tokenizer_fails_alone(lm, solo, bad):
    check_fails_alone(lm, solo, bad, "no tokenizer", "token ids")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([{"role": "user"}], "a mapping with 'role' and 'content'"),
        ([{}], "a mapping with 'role' and 'content'"),
        ([{"role": "user", "content": "a"}, "b"], "got 'b'"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_text_that_the_tokenizer_refuses_fails_alone(texted, solo, bad, why):
    refused = check_fails_alone(texted, solo, bad, why)
    assert refused.prompt_ids == []


# What can never fit.


def test_b10_what_can_never_fit_is_refused_with_both_numbers_and_the_others_run(lm, solo):
    long = variant(lm, max_positions=1024)
    numbers = ("300 prompt tokens", "5 new ones", "304 cells", "76 blocks of 4", "hold 256", "num_blocks=64")
    check_fails_alone(long, solo, [3] * 300, *numbers)
    # This one would outgrow the pool with nobody to evict, so it is refused as well; one cell less fits.
    check_fails_alone(long, solo, [3] * 253, "257 cells")
    endless = GenerationConfig(max_new_tokens=None, eos_token_id=-1)
    fits, to_the_end = long.generate_batch([[3] * 252] * 2, [GREEDY, endless], batching()).values()
    assert (len(fits.generated_tokens), fits.finish_reason) == (5, "length")
    assert to_the_end.generated_tokens == fits.generated_tokens, "without a limit it ends where the pool does"
    long.close()


def test_b10_the_width_of_the_block_table_is_a_limit_too(texted):
    config = batching(max_blocks_per_request=2)
    one = GenerationConfig(max_new_tokens=1, eos_token_id=-1)
    wide, narrow = texted.generate_batch([[3] * 9, [3] * 8], one, config, warmup=False).values()
    assert "max_blocks_per_request=2" in wide.error
    assert len(narrow.generated_tokens) == 1


def test_b31_a_prompt_at_the_end_of_the_models_positions(short):
    config = GenerationConfig(max_new_tokens=8, eos_token_id=-1)
    outputs = list(short.generate_batch([[3] * 24, [3] * 31, [3] * 32, [3] * 33], config, batching()).values())
    assert [len(output.generated_tokens) for output in outputs] == [8, 1, 0, 0]
    assert [output.finish_reason for output in outputs] == ["length", "length", "failed", "failed"]
    for output, tokens in zip(outputs[2:], (32, 33), strict=True):
        assert "32 positions" in output.error
        assert f"{tokens} tokens" in output.error


@pytest.mark.parametrize("setting", [{"num_blocks": 10**9}, {"max_batch_tokens": 10**9}])
def test_a_pool_beyond_the_memory_is_refused_and_the_next_call_works(lm, solo, setting):
    with pytest.raises(ValueError, match="num_blocks") as refused:
        lm.generate_batch(PROMPTS, GREEDY, batching(**(setting | {"max_memory_percent": 0.0001})))
    for knob in ("max_batch_tokens", "max_requests_per_batch", "max_memory_percent"):
        assert knob in str(refused.value)
    assert_same(lm.generate_batch(PROMPTS, GREEDY, batching()).values(), solo)


# Limits and stops.


@pytest.mark.parametrize("value", [0, -1])
def test_b30_no_new_tokens_are_refused(value):
    with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1; got {value}"):
        GenerationConfig(max_new_tokens=value)


@pytest.mark.parametrize(
    ("limit", "steps"), [(1, {"mixed": 1}), (2, {"mixed": 1, "decode": 1}), (5, {"mixed": 1, "decode": 4})]
)
def test_b30_as_many_tokens_as_asked_for_and_no_pass_more(lm, solo, limit, steps):
    config = GenerationConfig(max_new_tokens=limit, eos_token_id=-1)
    outputs = list(lm.generate_batch(PROMPTS, config, batching()).values())
    assert [output.generated_tokens for output in outputs] == [s.generated_tokens[:limit] for s in solo]
    assert lm.summary.steps == steps


def test_b30_none_means_to_the_models_last_position(short):
    config = GenerationConfig(max_new_tokens=None, eos_token_id=-1)
    outputs = list(short.generate_batch([[3] * 20, [3] * 31], config, batching()).values())
    assert [len(output.generated_tokens) for output in outputs] == [12, 1]


def test_b32_an_eos_id_as_the_first_token_ends_the_request_in_that_step(lm, solo):
    first = solo[0].generated_tokens[0]
    with_text = variant(lm, eos_token_ids=(first, 106), tokenizer=ByteTokenizer())
    (output,) = with_text.generate_batch(PROMPTS[:1], GenerationConfig(max_new_tokens=5), batching()).values()
    assert (output.generated_tokens, output.finish_reason) == ([first], "stop")
    assert len(output.logprobs) == len(output.timestamps) == 1
    assert with_text.summary.steps == {"mixed": 1}
    assert with_text.session.engine.state.pool.num_free == 64
    with_text.close()


@pytest.mark.parametrize("order", [0, 1])
def test_b32_every_eos_id_counts(lm, solo, order):
    tokens = solo[2].generated_tokens
    config = GenerationConfig(max_new_tokens=5, eos_token_id=[106, tokens[2]][:: 1 - 2 * order])
    (output,) = lm.generate_batch([PROMPTS[2]], config, batching()).values()
    assert (output.generated_tokens, output.finish_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


def test_b32_eos_can_be_ignored(lm, solo):
    stops_at_once = variant(lm, eos_token_ids=(solo[0].generated_tokens[0],))
    for ignore in (-1, [], [-1]):
        config = GenerationConfig(max_new_tokens=5, eos_token_id=ignore)
        assert_same(stops_at_once.generate_batch(PROMPTS[:1], config, batching()).values(), solo[:1])
    stops_at_once.close()


@pytest.mark.parametrize("bad", [VOCAB, 191222, [3, VOCAB]])
def test_b28_an_eos_id_outside_the_vocabulary_fails_alone(lm, solo, bad):
    generation = GenerationConfig(max_new_tokens=5, eos_token_id=bad)
    check_fails_alone(lm, solo, [4, 5], "EOS", str(VOCAB), generation=generation)


# Names.


@pytest.mark.parametrize(
    ("ids", "error"),
    [(["a", "b"], "one str per prompt"), (["a", "b", "a", "c"], "'a'"), ([1, 2, 3, 4], "one str per prompt")],
)
def test_b39_request_ids_must_be_one_str_for_each_and_differ(lm, solo, ids, error):
    with pytest.raises(ValueError, match=error):
        lm.generate_batch(PROMPTS, GREEDY, batching(), request_ids=ids)
    assert_same(lm.generate_batch(PROMPTS, GREEDY, batching()).values(), solo)


def test_b39_names_may_be_used_again_and_look_like_automatic_ones(lm, solo):
    upcoming = int(next(iter(lm.generate_batch([[1]], GREEDY, batching()))).removeprefix("req_")) + 1
    names = [f"req_{upcoming + i}" for i in range(4)]
    for _ in range(2):
        outputs = lm.generate_batch(PROMPTS, GREEDY, batching(), request_ids=names)
        assert list(outputs) == names
        assert_same(outputs.values(), solo)
    assert list(lm.generate_batch(PROMPTS, GREEDY, batching())) == names


@pytest.fixture
def engine():
    config = SchedulerConfig(
        policy=scheduler_named("fifo"),
        num_blocks=16,
        block_size=4,
        max_batch_tokens=16,
        max_requests_per_batch=4,
        max_blocks_per_request=16,
        safety_margin=0.0,
        num_words=len(SamplingParams().pack()),
    )
    device = HistoryHashDevice(num_blocks=16, block_size=4, num_slots=4, max_blocks=16)
    ladder = make_ladder(max_batch_tokens=16, max_rows=4)
    return Engine(device, config, ladder, vocab_size=997, max_positions=64)


def submit(engine, request_id, prompt):
    return engine.submit(request_id, prompt, max_new_tokens=6, eos_token_ids=(), sampling=SamplingParams())


def drain(engine):
    while not engine.is_idle:
        engine.step()


def expected_tokens(prompt):
    return solo_run(np.array(prompt, np.int32), SamplingParams().pack(), 6)


def test_b39_a_second_request_of_the_same_name_is_refused_and_the_first_unharmed(engine):
    first = submit(engine, "a", [1, 2, 3])
    for _ in range(3):
        with pytest.raises(ValueError, match="'a' is in use"):
            submit(engine, "a", [9, 9])
        engine.step()
    drain(engine)
    assert first.generated_tokens == expected_tokens([1, 2, 3])
    again = submit(engine, "a", [9, 9])
    drain(engine)
    assert again.generated_tokens == expected_tokens([9, 9])


def test_b39_cancelling_a_name_and_adding_it_again_before_the_next_step(engine):
    old = submit(engine, "a", [1, 2, 3])
    engine.step()
    assert engine.cancel("a") is old
    new = submit(engine, "a", [4, 5])
    drain(engine)
    assert (old.status, old.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
    assert old.generated_tokens == expected_tokens([1, 2, 3])[:1]
    assert new.generated_tokens == expected_tokens([4, 5])
    assert engine.cancel("a") is None
    assert engine.state.pool.num_free == 16


# Weights that make NaN.


@pytest.fixture(scope="module")
def poisoned(lm):
    """The model with a NaN embedding for id 7, which none of PROMPTS and their outputs contains."""
    weight = lm.params["embed"]["weight"]
    changed = flatten(lm.params) | {("embed", "weight"): weight.at[7].set(jnp.nan)}
    model = CausalLM(lm.bind, unflatten(changed), max_positions=lm.max_positions)
    yield model
    model.close()


def test_the_poisoned_id_is_not_in_the_good_requests(solo):
    assert 7 not in itertools.chain.from_iterable([*PROMPTS, *(output.generated_tokens for output in solo)])


@pytest.mark.parametrize("bad", [[7], [7, 1, 1], [1] * 30 + [7]], ids=["alone", "first", "last"])
@pytest.mark.parametrize("budget", [64, 8])
def test_invariant_6_nan_logits_fail_alone(poisoned, solo, bad, budget):
    config = batching(max_batch_tokens=budget)
    refused = check_fails_alone(poisoned, solo, bad, "not finite", "NaN", config=config)
    assert refused.prompt_ids == bad
    # The next requests get the blocks that hold its NaN.
    assert_same(poisoned.generate_batch(PROMPTS, GREEDY, config).values(), solo)


def test_invariant_6_a_request_that_meets_nan_later_keeps_its_tokens(lm, solo):
    fatal = solo[2].generated_tokens[1]
    weight = lm.params["embed"]["weight"]
    changed = flatten(lm.params) | {("embed", "weight"): weight.at[fatal].set(jnp.nan)}
    model = CausalLM(lm.bind, unflatten(changed), max_positions=lm.max_positions)
    spared = [i for i, s in enumerate(solo) if fatal not in s.generated_tokens[:-1] and fatal not in PROMPTS[i]]
    assert spared
    outputs = list(model.generate_batch(PROMPTS, GREEDY, batching()).values())
    assert_same([outputs[i] for i in spared], [solo[i] for i in spared])
    assert outputs[2].status == RequestStatus.FAILED
    assert outputs[2].generated_tokens == solo[2].generated_tokens[:2]
    assert len(outputs[2].logprobs) == len(outputs[2].timestamps) == 2
    model.close()


# The call as a whole.


@pytest.mark.parametrize("inputs", ["text", [1, 2, 3], 5, None, np.array([1, 2]), {"role": "user"}, [{"role": "user"}]])
def test_what_is_no_list_of_prompts_is_refused(lm, inputs):
    with pytest.raises(TypeError, match="inputs is a list of prompts"):
        lm.generate_batch(inputs, GREEDY, batching())


@pytest.mark.parametrize("configs", [[GREEDY], [GREEDY] * 3 + [None], {"max_new_tokens": 3}, 5, batching()])
def test_generation_configs_that_do_not_match_are_refused(lm, configs):
    with pytest.raises((TypeError, ValueError), match="GenerationConfig"):
        lm.generate_batch(PROMPTS, configs, batching())
