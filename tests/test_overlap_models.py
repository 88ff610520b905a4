"""Real models with the host running ahead: tokens and logprobs are those of each request alone, step by step."""

import random
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pressed_models import NAMES, make

from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.cache import HostTier

MODES = [
    {"async_depth": 1},
    {"async_depth": 3},
    {"decode_window": 8},
    {"decode_window": 3, "async_depth": 1},
    {"decode_window": 16, "async_depth": 2},
]
# Room for everybody, and a pool in which they lose their blocks, with host memory for some of them.
ROOMY = {"num_blocks": 128}
TIGHT = {"llama": {"num_blocks": 8}, "hybrid": {"num_blocks": 12}}


@pytest.fixture(scope="module", params=NAMES)
def lm(request):
    model = make(request.param)
    model.name = request.param
    yield model
    model.close()


def batching(lm, **settings):
    config: dict[str, Any] = {"block_size": 4, "max_blocks_per_request": 8, "max_batch_tokens": 64}
    config |= {"max_requests_per_batch": 8, "safety_margin": 0.0, "max_window_latency": 60.0}
    config |= {"return_logprobs": True, "compilation_cache": False}
    return ContinuousBatchingConfig(**(config | settings))


def generate(lm, prompts, configs, **settings):
    outputs = list(lm.generate_batch(prompts, configs, batching(lm, **settings)).values())
    assert not [output.error for output in outputs if output.error]
    return outputs


def assert_same(outputs, expected):
    for output, right in zip(outputs, expected, strict=True):
        assert output.generated_tokens == right.generated_tokens
        np.testing.assert_allclose(output.logprobs, right.logprobs, atol=1e-5)
        assert (output.finish_reason, output.status) == (right.finish_reason, right.status)


@pytest.fixture(scope="module")
def jobs(lm):
    """Prompts that partly begin alike, every setting, ends by length and EOS ids; each one's solo output."""
    rng = random.Random(0)
    shared = [rng.randrange(258) for _ in range(9)]
    prompts, configs, solo = [], [], []
    for i in range(14):
        own = [rng.randrange(258) for _ in range(rng.randint(1, 8))]
        sampling = {"temperature": 0.9, "top_k": 40, "seed": i} if i % 3 else {}
        config = GenerationConfig(max_new_tokens=rng.choice([1, 6, 12, 15]), eos_token_id=-1, **sampling)
        prompts.append(shared + own if i % 2 else own)
        alone = {"async_depth": None, "use_async_batching": False, **ROOMY, "allow_block_sharing": False}
        (output,) = generate(lm, prompts[-1:], config, **alone)
        if i % 3 == 1:  # ends by an id that it draws, the first of them or a later one
            config = replace(config, eos_token_id=rng.choice(output.generated_tokens))
            (output,) = generate(lm, prompts[-1:], config, **alone)
        configs.append(config)
        solo.append(output)
    assert {output.finish_reason for output in solo} == {"stop", "length"}
    return prompts, configs, solo


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_invariant_4_running_ahead_changes_no_token_and_no_logprob(lm, jobs, mode) -> None:
    prompts, configs, solo = jobs
    assert_same(generate(lm, prompts, configs, **ROOMY, **mode), solo)
    assert lm.session.engine.depth == mode.get("async_depth", 0)
    assert bool(lm.session.engine.stats.windows) == ("decode_window" in mode)


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_invariant_4_nor_does_it_under_pressure_with_a_host_tier_that_waits_for_each_copy(lm, jobs, mode) -> None:
    prompts, configs, solo = jobs
    settings = TIGHT[lm.name] | mode | {"cpu_offload_space": 3 * 1024 / 2**30}
    generate(lm, prompts[:1], configs[0], **settings)
    lm.session.device.host_tier = HostTier(None)
    assert_same(generate(lm, prompts, configs, **settings), solo)
    assert lm.session.engine.stats.offloads > 0
    pool = lm.session.engine.state.pool
    assert pool.num_free == settings["num_blocks"]


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_a_stream_yields_every_token_of_steps_that_are_read_together(lm, jobs, mode) -> None:
    prompts, configs, solo = jobs
    longest = max(range(len(solo)), key=lambda i: len(solo[i].generated_tokens))
    snapshots = list(lm.stream(prompts[longest], configs[longest], batching(lm, **ROOMY, **mode)))
    tokens = solo[longest].generated_tokens
    assert [output.generated_tokens for output in snapshots] == [tokens[:n] for n in range(1, len(tokens) + 1)]
    assert [len(output.logprobs) for output in snapshots] == list(range(1, len(tokens) + 1))
    assert [output.is_finished() for output in snapshots] == [False] * (len(tokens) - 1) + [True]


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_a_stream_that_is_closed_leaves_nothing_in_flight(lm, jobs, mode) -> None:
    prompts, configs, solo = jobs
    stream = lm.stream(prompts[0], GenerationConfig(max_new_tokens=24, eos_token_id=-1), batching(lm, **ROOMY, **mode))
    next(stream)
    stream.close()
    assert lm.session.engine.is_idle
    (output,) = lm.last_outputs.values()
    assert output.status is RequestStatus.CANCELLED
    assert_same(generate(lm, prompts, configs, **ROOMY, **mode), solo)


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_invariant_4_in_a_manager_whose_requests_are_cancelled_while_they_run(lm, jobs, mode) -> None:
    prompts, configs, solo = jobs
    settings = batching(lm, **ROOMY, **mode)
    with lm.continuous_batching_context_manager(continuous_batching_config=settings) as manager:
        right = [i for i, output in enumerate(solo) if len(output.generated_tokens) > 2]
        names = [manager.add_request(prompts[i], streaming=True, generation_config=configs[i]) for i in right]
        streams = [manager.request_id_iter(name) for name in names]
        for i, name, stream in zip(right, names, streams, strict=True):
            first = next(stream)
            assert first.generated_tokens == solo[i].generated_tokens[:1]
            if i % 4 == 0:
                manager.cancel_request(name)
        for i, stream in zip(right, streams, strict=True):
            *_, last = stream
            count = len(last.generated_tokens)
            assert last.generated_tokens == solo[i].generated_tokens[:count]
            np.testing.assert_allclose(last.logprobs, solo[i].logprobs[:count], atol=1e-5)
            assert last.status in (
                (RequestStatus.FINISHED, RequestStatus.CANCELLED) if i % 4 == 0 else (RequestStatus.FINISHED,)
            )
    assert lm.session.engine.is_idle


def test_a_row_that_ends_in_a_window_writes_no_cell_beyond_its_own(lm, jobs) -> None:
    """The store is NaN before; afterwards exactly the cells that belong to accepted tokens are numbers."""
    prompts, _, _ = jobs
    long = GenerationConfig(max_new_tokens=15, eos_token_id=-1)
    settings = {**ROOMY, "allow_block_sharing": False, "decode_window": 16}
    tokens = generate(lm, prompts[:1], long, **settings)[0].generated_tokens
    place = max(tokens.index(token) for token in tokens[:7])  # of the first token that is new, as late as may be
    configs = [replace(long, eos_token_id=tokens[place]), long]
    device = lm.session.device
    device.cache.kv = [jnp.full_like(array, jnp.nan) for array in device.cache.kv]
    with lm.recording() as records:
        outputs = generate(lm, prompts[:2], configs, **settings)
    assert outputs[0].generated_tokens == tokens[: place + 1]
    window = records[-1]
    assert window.plan.batch.window == 14
    written = np.stack([np.isfinite(np.asarray(array)).all(axis=(0, 1, 4)) for array in device.cache.kv]).all(axis=0)
    assert (written == np.isfinite(np.asarray(device.cache.kv[0])).any(axis=(0, 1, 4))).all(), "a cell is half written"
    right = np.zeros_like(written)
    for slot, output in enumerate(outputs):
        cells = np.arange(len(output.prompt_ids) + len(output.generated_tokens) - 1)
        table = window.state.records[slot].table
        assert table.shape[1] * 4 >= len(output.prompt_ids) + 14, "blocks of the whole window"
        for group in table:
            block = group[cells // 4]
            held = block < ROOMY["num_blocks"]
            right[block[held], cells[held] % 4] = True
    in_pool = slice(ROOMY["num_blocks"])
    # What a layer group's window has left was written, too, before it was given back.
    assert not (right & ~written)[in_pool].any()
    extra = np.argwhere((written & ~right)[in_pool])
    assert lm.name == "hybrid" or not len(extra)
    held = {block for record in window.state.records[:2] for block in record.table.ravel().tolist()}
    assert not held & set(extra[:, 0].tolist())


def test_a_request_with_more_ends_than_the_device_is_told_stops_at_the_right_one(lm, jobs) -> None:
    prompts, _, _ = jobs
    long = GenerationConfig(max_new_tokens=15, eos_token_id=-1)
    tokens = generate(lm, prompts[:1], long, **ROOMY)[0].generated_tokens
    never = [id for id in range(258) if id not in tokens][:6]
    last = max(tokens)  # ids are told in ascending order
    ids = [id for id in never if id < last][:5]
    assert len(ids) == 5
    config = replace(long, eos_token_id=[*ids, last])
    (output,) = generate(lm, prompts[:1], config, **ROOMY, decode_window=8)
    assert output.generated_tokens == tokens[: tokens.index(last) + 1]
    assert output.finish_reason == "stop"
