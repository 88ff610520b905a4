"""`generate_batch` and `stream`: what goes in, what comes out, and what is kept between calls."""

import copy
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax import session as session_module
from cbjax.machine import MachineFacts
from cbjax.models import flatten, unflatten
from cbjax.testing import ByteTokenizer, tiny_llama

PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 7, 64, 12, 80, 3], [1, 2], list(range(40, 61))]
GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)
ONE_TOKEN = GenerationConfig(max_new_tokens=1, eos_token_id=-1)


def batching(**settings):
    pool = {"block_size": 4, "num_blocks": 64, "max_blocks_per_request": 64}
    step = {"max_batch_tokens": 64, "max_requests_per_batch": 8}
    return ContinuousBatchingConfig(**(pool | step | {"compilation_cache": False} | settings))


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


@pytest.fixture(scope="module")
def solo(lm):
    """Each of PROMPTS in a call of its own: tokens and logprobs."""
    config = batching(return_logprobs=True)
    outputs = [next(iter(lm.generate_batch([prompt], GREEDY, config).values())) for prompt in PROMPTS]
    return [(output.generated_tokens, output.logprobs) for output in outputs]


@pytest.fixture
def no_compiling(lm):
    """The session is warm for PROMPTS, stays the model's, and refuses to compile."""
    lm.generate_batch(PROMPTS, GREEDY, batching())
    session = lm.session
    session.device.strict = True
    yield
    session.device.strict = False
    assert lm.session is session


def tokens_of(outputs):
    return [output.generated_tokens for output in outputs.values()]


def dense_greedy(lm, prompt, count):
    """The oracle: a full causal pass for each token, no cache, no batch."""
    tokens = np.zeros(32, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + count):
        tokens[end] = np.asarray(lm(tokens))[end - 1].argmax()
    return tokens[len(prompt) : len(prompt) + count].tolist()


# Inputs and outputs.


def test_outputs_come_in_the_order_of_the_inputs_and_equal_a_dense_pass(lm, solo):
    ids = ["e", "b", "d", "a", "c"]
    outputs = lm.generate_batch(PROMPTS, GREEDY, batching(), request_ids=ids)
    assert list(outputs) == ids
    assert [output.request_id for output in outputs.values()] == ids
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS
    assert tokens_of(outputs) == [tokens for tokens, _ in solo]
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        assert output.generated_tokens == dense_greedy(lm, prompt, 6)


def test_without_request_ids_names_go_on_over_the_life_of_the_model(fresh):
    assert list(fresh.generate_batch([[]], GREEDY, batching())) == ["req_0"]
    assert list(fresh.generate_batch([[], []], GREEDY, batching())) == ["req_1", "req_2"]


def test_ids_text_and_chat_in_one_call(lm):
    chat = [{"role": "user", "content": "hi"}]
    mixed = [[72, 105], "Hi", chat, (72, 105), np.array([72, 105])]
    outputs = list(lm.generate_batch(mixed, GREEDY, batching()).values())
    tokenizer = ByteTokenizer()
    expected = [[72, 105], tokenizer.encode("Hi"), tokenizer.chat(chat), [72, 105], [72, 105]]
    assert [output.prompt_ids for output in outputs] == expected
    assert all(output.status == RequestStatus.FINISHED for output in outputs)
    assert outputs[0].generated_tokens == outputs[3].generated_tokens == outputs[4].generated_tokens
    assert [output.text for output in outputs] == [tokenizer.decode(output.generated_tokens) for output in outputs]


def test_a_two_dimensional_array_is_a_list_of_prompts(lm, solo):
    prompts = np.array([PROMPTS[0], PROMPTS[0]], np.uint8)
    assert tokens_of(lm.generate_batch(prompts, GREEDY, batching())) == [solo[0][0]] * 2


def test_one_config_per_prompt(lm, solo):
    configs = [GenerationConfig(max_new_tokens=n, eos_token_id=-1) for n in (1, 2, 3, 4, 5)]
    outputs = lm.generate_batch(PROMPTS, configs, batching())
    assert tokens_of(outputs) == [tokens[:n] for n, (tokens, _) in enumerate(solo, start=1)]


def test_no_config_means_the_models_own(lm, solo):
    (output,) = lm.generate_batch([PROMPTS[0]], None, batching()).values()
    assert lm.generation_config == GenerationConfig(max_new_tokens=20)
    assert output.generated_tokens[:6] == solo[0][0]
    assert len(output.generated_tokens) == 20


def test_no_prompts_give_no_outputs(lm, no_compiling):
    assert lm.generate_batch([], GREEDY, batching()) == {}
    assert lm.last_outputs == {}
    assert str(lm.summary).splitlines()[0].split() == ["requests", "none"]


def test_logprobs_come_only_when_asked_for(lm, solo):
    without = lm.generate_batch(PROMPTS, GREEDY, batching(return_logprobs=False))
    assert [output.logprobs for output in without.values()] == [[]] * 5
    asked = lm.generate_batch(PROMPTS, GREEDY, batching(return_logprobs=True))
    for prompt, output, (tokens, logprobs) in zip(PROMPTS, asked.values(), solo, strict=True):
        assert output.generated_tokens == tokens
        np.testing.assert_allclose(output.logprobs, logprobs, rtol=0, atol=1e-5)
        sequence = np.zeros(32, np.int32)
        sequence[: len(prompt) + 6] = prompt + tokens
        dense = np.asarray(jax.nn.log_softmax(lm(sequence)))[len(prompt) - 1 :]
        np.testing.assert_allclose(output.logprobs, dense[np.arange(6), tokens], rtol=0, atol=2e-4)


def test_an_eos_id_ends_the_request_and_is_its_last_token(lm, solo):
    tokens = solo[2][0]
    stop = tokens[3]
    cut = tokens[: tokens.index(stop) + 1]
    config = GenerationConfig(max_new_tokens=6, eos_token_id=[stop, 257])
    (output,) = lm.generate_batch([PROMPTS[2]], config, batching()).values()
    assert (output.generated_tokens, output.finish_reason) == (cut, "stop")


def test_times_are_in_order(lm):
    outputs = lm.generate_batch(PROMPTS, GREEDY, batching()).values()
    for output in outputs:
        started, ended = output.lifespan
        assert 0 <= started <= output.timestamps[0] <= output.timestamps[-1] <= ended
        assert output.timestamps == sorted(output.timestamps)
        assert len(output.timestamps) == 6
        assert output.time_to_first_token == output.timestamps[0]
    assert lm.summary.first_token[1] == max(output.timestamps[0] for output in outputs)
    assert lm.summary.seconds >= max(output.lifespan[1] for output in outputs)


def test_the_summary_counts_what_was_done(lm):
    outputs = lm.generate_batch([*PROMPTS, []], GREEDY, batching())
    summary, programs = lm.summary, lm.session.device.programs
    assert lm.last_outputs is outputs
    assert summary.requests == {"finished": 5, "failed": 1}
    assert (summary.prompt_tokens, summary.generated_tokens) == (36, 30)
    # All prompts fit one step; each further token but the last takes one more.
    assert (summary.steps, summary.windows) == ({"mixed": 1, "decode": 5}, {})
    # Of 4 tokens each: 8, 6, 14, 7 and 26 cells.
    assert (summary.peak_blocks, summary.num_blocks) == (2 + 2 + 4 + 2 + 7, 64)
    assert (summary.soft_resets, summary.recomputed_tokens) == (0, 0)
    assert summary.tokens_per_second == pytest.approx(30 / summary.seconds)
    assert (summary.compiled, len(programs)) == (0, 4)
    labels = [line.split("  ")[0].strip() for line in str(summary).splitlines()]
    expected = "requests, tokens, speed, first token, steps, programs compiled, blocks, prefix cache, KV pressure"
    assert ", ".join(labels) == expected


def test_the_summary_tells_windows_from_single_steps(lm):
    lm.generate_batch(PROMPTS, GREEDY, batching(decode_window=4))
    summary = lm.summary
    assert summary.windows
    alone = summary.steps["decode"] - sum(summary.windows.values())
    assert alone + sum(size * count for size, count in summary.windows.items()) == 5
    for size, count in summary.windows.items():
        assert f"{count} of {size} steps" in str(summary)


def test_invariant_6_what_the_caller_hands_in_is_not_changed(lm):
    prompts = [np.array([3, 4, 5], np.int64), [6, 7], [{"role": "user", "content": "x"}]]
    generation = GenerationConfig(max_new_tokens=3, temperature=0.5, eos_token_id=[9, 4])
    config = batching(seed=4)
    before = copy.deepcopy((prompts[1:], generation, config))
    lm_before = (lm.config, lm.generation_config, lm.eos_token_ids, lm.params["embed"]["weight"])
    lm.generate_batch(prompts, generation, config)
    assert (prompts[1:], generation, config) == before
    np.testing.assert_array_equal(prompts[0], [3, 4, 5])
    assert prompts[0].flags.writeable
    assert prompts[0].dtype == np.int64
    assert lm_before[:3] == (lm.config, lm.generation_config, lm.eos_token_ids)
    assert lm_before[3] is lm.params["embed"]["weight"]


# What is kept between calls.


def buffers(lm):
    return [array.unsafe_buffer_pointer() for array in lm.session.device.cache.kv]


def test_a_second_call_neither_compiles_nor_reallocates(lm, solo, no_compiling, monkeypatch):
    session, programs, pointers = lm.session, dict(lm.session.device.programs), buffers(lm)
    monkeypatch.setattr(jnp, "zeros", lambda *args, **kwargs: pytest.fail("an array is allocated"))
    outputs = lm.generate_batch(PROMPTS[::-1], GREEDY, batching())
    assert tokens_of(outputs) == [tokens for tokens, _ in solo[::-1]]
    assert lm.session is session
    assert session.device.programs == programs
    assert buffers(lm) == pointers
    assert lm.summary.compiled == 0


def test_seed_logprobs_and_smaller_workloads_share_the_session(lm, no_compiling):
    session = lm.session
    lm.generate_batch(PROMPTS[:3], GREEDY, batching(seed=3, return_logprobs=True))
    lm.generate_batch([], GREEDY, batching())
    lm.generate_batch([[]], GREEDY, batching())
    assert lm.session is session


def test_other_settings_make_a_new_session(lm, solo):
    lm.generate_batch(PROMPTS, GREEDY, batching())
    old, arrays = lm.session, list(lm.session.device.cache.kv)
    outputs = lm.generate_batch(PROMPTS, ONE_TOKEN, batching(block_size=8), warmup=False)
    assert tokens_of(outputs) == [tokens[:1] for tokens, _ in solo]
    assert lm.session is not old
    assert all(array.is_deleted() for array in arrays)


def test_a_larger_workload_makes_a_new_session_and_a_smaller_one_does_not(lm):
    config = batching(num_blocks=None, max_requests_per_batch=2)
    lm.generate_batch([[1, 2]], ONE_TOKEN, config, warmup=False)
    first, size = lm.session, lm.session.resolved.scheduler.num_blocks
    lm.generate_batch([[1, 2, 3]], ONE_TOKEN, config, warmup=False)
    assert lm.session is first
    outputs = lm.generate_batch([[7] * 130, [8] * 130, [9] * 130], ONE_TOKEN, config, warmup=False)
    assert lm.session is not first
    assert lm.session.resolved.scheduler.num_blocks > size
    assert all(output.status == RequestStatus.FINISHED for output in outputs.values())
    second = lm.session
    lm.generate_batch([[1, 2]], ONE_TOKEN, config, warmup=False)
    assert lm.session is second


@pytest.fixture
def fresh(lm):
    """The same weights without a session."""
    model = CausalLM(lm.bind, lm.params, max_positions=lm.max_positions)
    yield model
    model.close()


@pytest.mark.parametrize("inputs", [[], [[]], [[1] * 999]])
def test_nothing_to_run_takes_no_memory(fresh, inputs, monkeypatch):
    machine = MachineFacts(platform="cpu", device="cpu", free_bytes=64 << 20, source="a test")
    monkeypatch.setattr(session_module, "machine_facts", lambda: machine)
    assert len(fresh.generate_batch(inputs, GREEDY, batching(num_blocks=None))) == len(inputs)
    assert fresh.session is None or fresh.session.resolved.num_bytes < 4 << 20


def test_nothing_to_run_ends_no_session(lm):
    config = batching(num_blocks=None, max_requests_per_batch=2)
    lm.generate_batch([[1]], ONE_TOKEN, config, warmup=False)
    session = lm.session
    for inputs in ([], [[]], [[1] * 999]):
        lm.generate_batch(inputs, GREEDY, config)
        assert lm.session is session


def test_close_gives_the_memory_back_and_the_next_call_works(lm, solo):
    lm.generate_batch(PROMPTS, GREEDY, batching())
    arrays = [*lm.session.device.cache.kv, lm.session.device.slots.table]
    lm.close()
    assert lm.session is None
    assert all(array.is_deleted() for array in arrays)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lm.params))
    lm.close()
    assert tokens_of(lm.generate_batch(PROMPTS, GREEDY, batching())) == [tokens for tokens, _ in solo]


def test_new_params_take_effect_without_compiling(lm, solo, no_compiling):
    old = lm.params
    lm.params = jax.tree.map(lambda leaf: leaf[::-1], old)
    outputs = lm.generate_batch(PROMPTS, GREEDY, batching())
    expected = [dense_greedy(lm, prompt, 6) for prompt in PROMPTS]
    lm.params = old
    assert tokens_of(outputs) == expected
    again = lm.generate_batch(PROMPTS, GREEDY, batching())
    assert tokens_of(outputs) != tokens_of(again) == [tokens for tokens, _ in solo]


def test_params_of_another_model_are_refused(lm):
    old = lm.params
    flat = flatten(old)
    up = ("layers", 1, "mlp", "up", "weight")
    others = {
        "another shape": flat | {up: jnp.zeros((32, 32))},
        "another dtype": flat | {up: flat[up].astype(jnp.bfloat16)},
        "one more": flat | {("head", "bias"): jnp.zeros(258)},
        "one less": {path: leaf for path, leaf in flat.items() if path != up},
    }
    for params in others.values():
        with pytest.raises(ValueError, match="structure, shapes and dtypes"):
            lm.params = unflatten(params)
    assert lm.params is old


# Streaming.


def test_stream_yields_every_token_once_and_ends_with_the_output_of_generate_batch(lm):
    config = GenerationConfig(max_new_tokens=12, eos_token_id=-1)
    (expected,) = lm.generate_batch(["stream me"], config, batching(return_logprobs=True)).values()
    snapshots = list(lm.stream("stream me", config, batching(return_logprobs=True)))
    assert [len(snapshot.generated_tokens) for snapshot in snapshots] == list(range(1, 13))
    for before, after in itertools.pairwise(snapshots):
        assert after.generated_tokens[:-1] == before.generated_tokens
        assert after.text.startswith(before.text)
        assert not before.is_finished()
    last = snapshots[-1]
    assert last.is_finished()
    assert (last.generated_tokens, last.text, last.logprobs, last.finish_reason) == (
        expected.generated_tokens,
        expected.text,
        expected.logprobs,
        "length",
    )
    assert lm.last_outputs == {last.request_id: last}


def test_a_bad_prompt_in_a_stream_is_one_failed_output(lm):
    (output,) = lm.stream([], GREEDY, batching())
    assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "failed")
    assert "at least one token" in output.error


def test_closing_a_stream_cancels_its_request_and_frees_its_blocks(lm, solo, no_compiling):
    stream = lm.stream(PROMPTS[0], GREEDY, batching())
    first, second = next(stream), next(stream)
    assert (first.generated_tokens, second.generated_tokens) == (solo[0][0][:1], solo[0][0][:2])
    assert lm.session.engine.state.pool.num_free < 64
    stream.close()
    (output,) = lm.last_outputs.values()
    assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
    assert output.generated_tokens == solo[0][0][:2]
    assert lm.session.engine.state.pool.num_free == 64
    assert lm.session.engine.is_idle
    assert tokens_of(lm.generate_batch(PROMPTS[:1], GREEDY, batching())) == [solo[0][0]]


def test_a_call_inside_a_stream_is_an_error_and_the_stream_goes_on(lm, solo):
    stream = lm.stream(PROMPTS[0], GREEDY, batching())
    next(stream)
    with pytest.raises(RuntimeError, match="finish or close"):
        lm.generate_batch(PROMPTS[1:2], GREEDY, batching())
    with pytest.raises(RuntimeError, match="finish or close"):
        next(lm.stream(PROMPTS[1], GREEDY, batching()))
    assert list(stream)[-1].generated_tokens == solo[0][0]


# Other ways to run.


def test_bfloat16_runs_and_takes_near_best_tokens():
    """In bfloat16 a near tie may fall either way, so tokens are held against the dense pass by their logits."""
    lm = tiny_llama(dtype="bfloat16")
    outputs = lm.generate_batch(PROMPTS, GREEDY, batching(max_requests_per_batch=2, return_logprobs=True))
    assert {array.dtype for array in lm.session.device.cache.kv} == {jnp.dtype(jnp.bfloat16)}
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        tokens = np.zeros(32, np.int32)
        tokens[: len(prompt) + 6] = prompt + output.generated_tokens
        dense = np.asarray(lm(tokens))[len(prompt) - 1 :][:6]
        assert (dense[np.arange(6), output.generated_tokens] > dense.max(axis=1) - 0.2).all()
        assert np.isfinite(output.logprobs).all()
    lm.close()


def test_threads_that_call_at_once_are_served_one_after_another(lm, solo):
    results, ready = {}, threading.Barrier(3)

    def call(name, prompts):
        ready.wait()
        results[name] = tokens_of(lm.generate_batch(prompts, GREEDY, batching()))

    groups = {"a": PROMPTS[:2], "b": PROMPTS[2:], "c": PROMPTS[::-1]}
    threads = [threading.Thread(target=call, args=item) for item in groups.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tokens = [tokens for tokens, _ in solo]
    assert results == {"a": tokens[:2], "b": tokens[2:], "c": tokens[::-1]}
