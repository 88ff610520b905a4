"""The engine over each attention implementation: the same tokens, whoever attends and wherever the blocks are moved."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from pressed_models import NAMES, make

from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.attention import AttentionChoice
from cbjax.attention.pallas_gpu import PallasGpuAttention
from cbjax.testing import tiny_llama
from pallas_kernels.paged_attention.gpu import GpuLayout, GpuSizes

PROMPTS = [list(range(40, 75)), list(range(40, 72)), [5], [200, 9, 9, 31, 7, 64, 12, 80, 3]]


def batching(name, **settings):
    pool = {"block_size": 16, "num_blocks": 24, "max_batch_tokens": 32, "max_requests_per_batch": 4}
    step = {"max_blocks_per_request": 6, "return_logprobs": True, "decode_buckets": [4], "mixed_buckets": [32]}
    return ContinuousBatchingConfig(**(pool | step | {"attn_implementation": name} | settings))


def generate(lm, config, *, new_tokens=6, forks=1):
    asked = GenerationConfig(
        max_new_tokens=new_tokens, eos_token_id=-1, num_return_sequences=forks, temperature=0.7, seed=3
    )
    outputs = lm.generate_batch(PROMPTS, asked, config).values()
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.generated_tokens for output in outputs], [output.logprobs for output in outputs]


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(num_layers=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def wanted(lm):
    return generate(lm, batching("xla"), new_tokens=20), generate(lm, batching("xla"), forks=2)


@pytest.mark.parametrize("name", ["eager", "pallas"])
def test_invariant_4_tokens_do_not_depend_on_who_attends(lm, wanted, name):
    """In a pool with room, where prompts share a block and forks copy one; and in one that loses blocks."""
    alone, forked = wanted
    tokens, logprobs = generate(lm, batching(name), forks=2)
    assert tokens == forked[0]
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(forked[1]), atol=1e-5)
    assert lm.summary.cached_tokens > 0
    tight = batching(name, num_blocks=5, safety_margin=0.0, cpu_offload_space=0.01, decode_window=4)
    tokens, logprobs = generate(lm, tight, new_tokens=20)
    assert tokens == alone[0]
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(alone[1]), atol=1e-5)
    assert lm.summary.offloads + lm.summary.soft_resets > 0


@pytest.fixture
def on_gpu(monkeypatch):
    """A model whose sessions attend by the GPU kernels, interpreted."""
    model = tiny_llama(num_layers=1, dtype="bfloat16", seed=2)
    attention = PallasGpuAttention(
        sizes=GpuSizes(multiprocessors=2, decode_programs=1), interpret=plgpu.InterpretGPUParams()
    )
    choice = AttentionChoice(attention=attention, used="pallas", why="for this test", is_interpreted=True)
    yield model, lambda: monkeypatch.setattr("cbjax.session.attention_of", lambda *_: choice)
    model.close()


def test_invariant_4_the_gpu_kernels_give_the_tokens_that_xla_gives(on_gpu):
    """In bfloat16, so a near tie may fall either way: from there on a request's greedy tokens are others."""
    model, take = on_gpu
    asked = GenerationConfig(max_new_tokens=8, eos_token_id=-1)
    tight = {"num_blocks": 5, "safety_margin": 0.0}
    wanted = list(model.generate_batch(PROMPTS, asked, batching("xla")).values())
    model.close()
    take()
    for settings in ({}, tight):
        outputs, ties = model.generate_batch(PROMPTS, asked, batching("pallas", **settings)).values(), 0
        for output, right in zip(outputs, wanted, strict=True):
            pairs = zip(output.generated_tokens, right.generated_tokens, strict=True)
            tie = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), 8)
            ties += tie < 8
            np.testing.assert_allclose(output.logprobs[: tie + 1], right.logprobs[: tie + 1], atol=0.05)
        assert ties <= 1
    (array, *_) = model.session.device.cache.kv
    assert array.shape == GpuLayout(num_kv_heads=2, head_dim=16, block_size=16, num_blocks=5).shape


# The random jobs of the tests of running ahead, in blocks that the kernels take.

MODES = [
    {},
    {"async_depth": 3},
    {"decode_window": 16, "async_depth": 2},
    {"tight": True, "decode_window": 5, "async_depth": 1, "cpu_offload_space": 0.001},
    {"tight": True},
]
# Blocks that one request fits, but not four.
TIGHT = {"llama": 6, "hybrid": 10}


@pytest.fixture(scope="module", params=NAMES)
def pressed(request):
    model = make(request.param)
    model.name = request.param
    yield model
    model.close()


@pytest.fixture(scope="module")
def jobs(pressed):
    """Prompts that partly begin alike, greedy and sampled, ends by length and EOS ids; what xla gives each alone."""
    rng, shared = np.random.default_rng(0), list(range(20))
    prompts, configs, solo = [], [], []
    for i in range(8):
        own = rng.integers(0, 258, rng.integers(1, 20)).tolist()
        prompts.append(shared + own if i % 2 else own)
        sampling = {"temperature": 0.9, "top_k": 40, "seed": i} if i % 3 else {}
        config = GenerationConfig(max_new_tokens=int(rng.integers(2, 40)), eos_token_id=-1, **sampling)
        (output,) = pressed.generate_batch(prompts[-1:], config, roomy("xla")).values()
        if i % 3 == 1:  # ends by an id that it draws
            config = replace(config, eos_token_id=output.generated_tokens[len(output.generated_tokens) // 2])
            (output,) = pressed.generate_batch(prompts[-1:], config, roomy("xla")).values()
        configs.append(config)
        solo.append(output)
    assert {output.finish_reason for output in solo} == {"stop", "length"}
    return prompts, configs, solo


def roomy(name, **settings):
    room = {"num_blocks": 64, "safety_margin": 0.0, "max_requests_per_batch": 8, "decode_buckets": [8]}
    return batching(name, **(room | {"max_window_latency": 60.0} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_invariant_4_the_kernels_give_every_request_its_solo_tokens_in_every_mode(pressed, jobs, mode):
    prompts, configs, solo = jobs
    settings = {key: value for key, value in mode.items() if key != "tight"}
    if "tight" in mode:
        settings["num_blocks"] = TIGHT[pressed.name]
    outputs = list(pressed.generate_batch(prompts, configs, roomy("pallas", **settings)).values())
    for output, right in zip(outputs, solo, strict=True):
        assert (output.generated_tokens, output.finish_reason) == (right.generated_tokens, right.finish_reason)
        np.testing.assert_allclose(output.logprobs, right.logprobs, atol=1e-5)
    (used,) = (d.used for d in pressed.session.resolved.decisions if d.field == "attn_implementation")
    assert used == "pallas, interpreted"
    summary = pressed.summary
    assert bool(summary.offloads + summary.soft_resets) == ("tight" in mode)
    assert bool(summary.windows) == ("decode_window" in mode)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_invariant_4_the_kernels_serve_a_manager_whose_requests_are_cancelled(pressed, jobs, depth):
    prompts, configs, solo = jobs
    settings = roomy("pallas", async_depth=depth)
    with pressed.continuous_batching_context_manager(continuous_batching_config=settings) as manager:
        names = [
            manager.add_request(ids, streaming=True, generation_config=config)
            for ids, config in zip(prompts, configs, strict=True)
        ]
        for i, (name, right) in enumerate(zip(names, solo, strict=True)):
            stream = manager.request_id_iter(name)
            next(stream)
            if i % 4 == 0:
                manager.cancel_request(name)
            last = deque(stream, maxlen=1)[0]
            count = len(last.generated_tokens)
            assert last.generated_tokens == right.generated_tokens[:count]
            assert last.finish_reason in (right.finish_reason, *(["cancelled"] if i % 4 == 0 else []))
