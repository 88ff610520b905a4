"""Invariant 7 at length: 500 requests with every sampling option there is compile nothing after warm-up."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.testing import ByteTokenizer, tiny_llama

BATCHING = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=48,  # tight: many lose their blocks
    max_blocks_per_request=32,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    cpu_offload_space=0.001,
    compilation_cache=False,
    seed=7,
)
MODES = (
    {"use_async_batching": False},
    {"use_async_batching": True, "async_depth": 3, "return_logprobs": True},
    {"use_async_batching": True, "decode_window": 16},
    {"use_async_batching": False, "decode_window": 8, "return_logprobs": True},
)


@pytest.fixture(scope="module")
def lm() -> Iterator[CausalLM]:
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


def random_settings(rng: np.random.Generator) -> GenerationConfig:
    """Any of the options, alone and together."""

    def maybe(values: list, share: float = 0.5):
        return values[rng.integers(len(values))] if rng.random() < share else None

    common = {
        "max_new_tokens": int(rng.integers(1, 40)),
        "seed": maybe([0, 1, 2**63 - 1]),
        "eos_token_id": maybe([-1, 3, (1, 2, 3), tuple(range(50, 60))]),
    }
    if rng.random() < 0.3:
        return GenerationConfig(do_sample=maybe([False]), temperature=None, **common)
    return GenerationConfig(
        do_sample=True,
        temperature=maybe([0.01, 0.7, 1.0, 5.0]),
        top_k=maybe([-1, 0, 1, 5, 258, 1000]),
        top_p=maybe([0.05, 0.5, 0.999, 1.0]),
        num_return_sequences=int(rng.integers(1, 4)),
        **common,
    )


def random_prompts(rng: np.random.Generator, count: int) -> list:
    """Ids, some of which begin alike, and text."""
    common = rng.integers(258, size=40).tolist()
    prompts: list = [
        common[: rng.integers(0, 40)] + rng.integers(258, size=rng.integers(1, 50)).tolist() for _ in range(count)
    ]
    prompts[::10] = ["once upon a time"[: int(rng.integers(1, 16))] for _ in prompts[::10]]
    return prompts


def test_invariant_7_five_hundred_requests_of_every_kind_compile_nothing(
    lm: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    prompts, settings = random_prompts(rng, 500), [random_settings(rng) for _ in range(500)]
    lm.generate_batch([], continuous_batching_config=BATCHING)
    session = lm.session
    assert session is not None
    session.warmup()
    session.device.strict = True
    programs = dict(session.device.programs)
    evicted = windows = forked = 0
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for first in range(0, 500, 5):
            # A window opens only while nobody waits, so those come in small calls.
            mode, count = MODES[first // 125], 5 if "decode_window" in MODES[first // 125] else 125
            if first % count:
                continue
            config, asked = dataclasses.replace(BATCHING, **mode), settings[first : first + count]
            outputs = lm.generate_batch(prompts[first : first + count], asked, config, warmup=bool(first % 2))
            assert {output.status for output in outputs.values()} == {RequestStatus.FINISHED}
            assert len(outputs) == sum(each.num_return_sequences for each in asked)
            evicted += session.engine.stats.soft_resets + session.engine.stats.offloads
            windows += session.engine.stats.windows.total()
            forked += len(outputs) - count
        for output in lm.stream("the sea", GenerationConfig(max_new_tokens=5, top_p=0.9), BATCHING):
            last = output
        assert last.is_finished()
        with lm.continuous_batching_context_manager(continuous_batching_config=BATCHING) as manager:
            names = [manager.add_request(p, generation_config=s) for p, s in zip(prompts[:20], settings, strict=False)]
            manager.cancel_request(names[3])
    assert "ompil" not in caplog.text
    assert lm.session is session, "another session was made, which is not strict"
    assert session.device.programs == programs
    assert evicted > 100
    assert windows > 50
    assert forked > 300
