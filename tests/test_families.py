"""Every family against transformers: greedy tokens, logprobs and logits of tiny checkpoints, however they are batched.

Goldens: `tests/goldens/families.json`, made by `make_family_goldens.py` one prompt at a time. No margin between the two
best logits in it is below 0.01, so equality is meaningful. The prompts of families with a window (see `WINDOWS`) lie
around its edge of 8 tokens and every answer crosses it.
"""

import json
from pathlib import Path

import family_checkpoints as checkpoints
import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "families.json").read_text())
# EOS ignored: there is none.
GREEDY = GenerationConfig(max_new_tokens=checkpoints.MAX_NEW_TOKENS)
WINDOWS = {
    "mistral": (8, 8),
    "qwen2": (None, 8, 8),
    "smollm3": (None, 8, None),
    "gemma2": (8, None),
    "gemma3": (8, 8, None),
    "gpt_oss": (8, None),
}
# Blocks that the longest request of 63 tokens just fits: 16 for each group of full layers, 4 for one with a window.
TIGHT = {"mistral": 4, "qwen2": 25, "smollm3": 37, "gemma2": 21, "gemma3": 25, "gpt_oss": 21}


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def lm(family, tmp_path_factory):
    lm = CausalLM.from_pretrained(checkpoints.write(family, tmp_path_factory.mktemp(family)))
    yield lm
    lm.close()


def batching(**settings):
    defaults = {"block_size": 4, "num_blocks": 160, "max_batch_tokens": 64, "max_requests_per_batch": 8}
    return ContinuousBatchingConfig(**(defaults | {"return_logprobs": True, "compilation_cache": False} | settings))


def assert_equal_goldens(lm, records, config):
    prompts = [record["prompt_ids"] for record in records]
    # Without warm-up only those programs are compiled that are used.
    outputs = list(lm.generate_batch(prompts, GREEDY, config, warmup=False).values())
    for record, output in zip(records, outputs, strict=True):
        assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "length"), output.error
        assert output.generated_tokens == record["tokens"], f"{len(record['prompt_ids'])} prompt tokens"
        np.testing.assert_allclose(output.logprobs, record["logprobs"], rtol=0, atol=2e-4)
    return outputs


def test_b09_goldens_are_what_the_claim_needs(family):
    records = GOLDENS[family]
    assert [len(record["prompt_ids"]) for record in records] == [1, 7, 8, 9, 12, 16, 25, 40]
    assert min(min(record["margins"]) for record in records) >= 0.01
    # Not a loop: an answer that repeats one token would survive many defects.
    assert len({token for record in records for token in record["tokens"]}) >= 48


def test_b09_the_layers_tell_the_engine_their_windows(family, lm):
    expected = WINDOWS.get(family, (None,) * lm.config.num_layers)
    assert tuple(layer.window for layer in lm.layers) == expected


def test_dense_logits_equal_transformers(family, lm):
    record = GOLDENS[family][checkpoints.LOGITS_PROMPT]
    logits = np.asarray(lm(np.array(record["prompt_ids"], np.int32)))
    np.testing.assert_allclose(logits[-checkpoints.LOGITS_POSITIONS :], record["logits"], rtol=0, atol=1e-4)


def test_b09_all_prompts_in_one_batch_equal_transformers(family, lm):
    assert_equal_goldens(lm, GOLDENS[family], batching())
    assert set(lm.summary.steps) == {"mixed", "decode"}


def test_b09_each_prompt_alone_equals_transformers(family, lm):
    for record in GOLDENS[family]:
        assert_equal_goldens(lm, [record], batching())


def test_b09_chunks_of_three_tokens_in_a_tight_pool_equal_transformers(family, lm):
    """Chunks that begin and end anywhere in a window, soft resets, and blocks that are used again at once."""
    tight = {"num_blocks": TIGHT.get(family, 17), "safety_margin": 0.0}
    config = batching(max_blocks_per_request=0, max_batch_tokens=3, max_requests_per_batch=3, **tight)
    outputs = assert_equal_goldens(lm, GOLDENS[family], config)
    assert sum(output.num_soft_resets for output in outputs) > 0


def test_a_missing_tensor_is_named(family, tmp_path):
    name = {
        "qwen2": "model.layers.1.self_attn.k_proj.bias",
        "qwen3": "model.layers.1.self_attn.q_norm.weight",
        "gemma2": "model.layers.1.pre_feedforward_layernorm.weight",
        "gemma3": "model.layers.1.post_feedforward_layernorm.weight",
        "gpt_oss": "model.layers.1.self_attn.sinks",
    }.get(family, "model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(ValueError, match=f"1 missing: {name}"):
        CausalLM.from_pretrained(checkpoints.write(family, tmp_path, without=name))
