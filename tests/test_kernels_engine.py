"""The engine over each attention implementation: the same tokens, whoever attends and wherever the blocks are moved."""

import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.testing import tiny_llama

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
