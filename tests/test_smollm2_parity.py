"""The demo model against transformers' `generate` in float32: the same tokens, whatever the batch, blocks and chunks.

Goldens: `tests/goldens/smollm2.json`, made by `make_smollm2.py` one prompt at a time. No margin between the two best
logits in it is below 2e-4, so equality is meaningful.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text())
CHAT, RAW = GOLDENS["chat"], GOLDENS["raw"]
RECORDS = CHAT + RAW
# Raw records were made ignoring EOS.
CONFIGS = [GenerationConfig(max_new_tokens=64)] * len(CHAT) + [
    GenerationConfig(max_new_tokens=64, eos_token_id=-1) for _ in RAW
]

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def lm(demo_gguf):
    model = CausalLM.from_pretrained(demo_gguf)
    yield model
    model.close()


def generate(lm, records, configs, **settings):
    config = ContinuousBatchingConfig(return_logprobs=True, **settings)
    # Without warm-up only programs that a step needs are compiled; what they compute is the same.
    outputs = lm.generate_batch([record["prompt_ids"] for record in records], configs, config, warmup=False)
    for record, output in zip(records, outputs.values(), strict=True):
        assert output.status == RequestStatus.FINISHED, output.error
        assert output.prompt_ids == record["prompt_ids"]
        assert output.generated_tokens == record["tokens"], f"{len(record['prompt_ids'])} prompt tokens"
        np.testing.assert_allclose(output.logprobs, record["logprobs"], rtol=0, atol=2e-4)
    return list(outputs.values())


def test_goldens_are_what_the_claim_needs():
    assert len(CHAT) >= 12
    assert [len(record["prompt_ids"]) for record in RAW] == [1, 2, 15, 16, 17, 31, 32, 33, 64, 129]
    assert min(min(record["margins"]) for record in RECORDS) >= 2e-4


# Tiny models go through all pairs on every run.
IN_EVERY_RUN = {(16, 16)}
PAIRS = [
    pytest.param(*pair, marks=() if pair in IN_EVERY_RUN else pytest.mark.slow)
    for pair in itertools.product((4, 16, 256), (16, 64, 512))
]


@pytest.mark.parametrize(("block_size", "budget"), PAIRS)
def test_all_prompts_in_one_batch_equal_transformers(lm, block_size, budget):
    outputs = generate(lm, RECORDS, CONFIGS, block_size=block_size, max_batch_tokens=budget, max_requests_per_batch=32)
    assert sum(output.num_soft_resets for output in outputs) == 0


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_each_prompt_alone_equals_transformers(lm, every):
    for record, config in list(zip(RECORDS, CONFIGS, strict=True))[::every]:
        generate(lm, [record], [config], block_size=16, num_blocks=32)
    compiled = len(lm.session.device.programs)
    generate(lm, RECORDS[:1], CONFIGS[:1], block_size=16, num_blocks=32)
    assert len(lm.session.device.programs) == compiled


@pytest.mark.parametrize("scheduler_type", ["fifo", pytest.param("prefill_first", marks=pytest.mark.slow)])
def test_invariant_4_a_tight_pool_with_many_soft_resets_equals_transformers(lm, scheduler_type):
    # The longest request needs 20 blocks, all 25 together about 200.
    outputs = generate(
        lm,
        RECORDS,
        CONFIGS,
        block_size=16,
        num_blocks=28,
        max_batch_tokens=64,
        max_requests_per_batch=16,
        scheduler_type=scheduler_type,
        safety_margin=0.0,
    )
    assert sum(output.num_soft_resets for output in outputs) >= 10
    engine = lm.session.engine
    assert engine.state.pool.num_free == 28
    assert engine.stats.soft_resets >= 10


@pytest.mark.parametrize(
    "gib",
    [pytest.param(1.0, marks=pytest.mark.slow), pytest.param(0.0, marks=pytest.mark.slow), 0.006],
    ids=["offload", "soft reset", "mixed"],
)
def test_invariant_4_32_requests_under_pressure_equal_transformers_and_offload_computes_nothing_again(lm, gib):
    # A block has 16 tokens of 45 KiB each, so 0.006 GiB hold 8 blocks, which is not enough for every victim.
    outputs = generate(
        lm,
        RECORDS + RECORDS[:7],
        CONFIGS + CONFIGS[:7],
        block_size=16,
        num_blocks=28,
        max_batch_tokens=64,
        max_requests_per_batch=16,
        safety_margin=0.0,
        cpu_offload_space=gib,
    )
    summary = lm.summary
    assert (summary.soft_resets, summary.offloads) == (
        sum(output.num_soft_resets for output in outputs),
        sum(output.num_offloads for output in outputs),
    )
    assert summary.soft_resets + summary.offloads >= 20
    assert (summary.soft_resets > 0) == (gib < 1.0) == (summary.recomputed_tokens > 0)
    assert (summary.offloads > 0) == (gib > 0.0) == (summary.copied_bytes > 0)
    assert lm.session.engine.state.pool.num_free == 28


def test_chat_text_and_stop_reason_equal_transformers(lm):
    config = ContinuousBatchingConfig(block_size=16, num_blocks=40)
    outputs = lm.generate_batch([record["messages"] for record in CHAT], CONFIGS[: len(CHAT)], config, warmup=False)
    for record, output in zip(CHAT, outputs.values(), strict=True):
        assert output.prompt_ids == record["prompt_ids"]
        assert (output.text, output.finish_reason) == (record["text"], record["finish_reason"])
