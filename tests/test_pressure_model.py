"""KV pressure on real models: tokens and logprobs are those of a huge pool, whatever happens to the blocks."""

import random

import numpy as np
import pytest
from pressed_models import NAMES, make

from cbjax import ContinuousBatchingConfig, GenerationConfig

PRESSURE = {
    "soft reset": {},
    "offload": {"cpu_offload_space": 1.0},
    "mixed": {"cpu_offload_space": "4 blocks"},
}


@pytest.fixture(scope="module", params=NAMES)
def lm(request):
    model = make(request.param)
    yield model
    model.close()


def make_jobs(seed: int) -> tuple[list[list[int]], list[GenerationConfig]]:
    """Prompts, half of which begin alike, and settings, half of which sample."""
    rng = random.Random(seed)
    shared = [rng.randrange(258) for _ in range(9)]
    prompts, settings = [], []
    for i in range(9):
        own = [rng.randrange(258) for _ in range(rng.randint(1, 8))]
        prompts.append(shared + own if i % 2 else own)
        sampling = {"temperature": 0.9, "top_k": 40, "seed": i} if i % 3 else {}
        settings.append(GenerationConfig(max_new_tokens=rng.randint(4, 14), eos_token_id=-1, **sampling))
    return prompts, settings


def run(lm, jobs, **settings):
    config = {"block_size": 4, "num_blocks": 128, "max_blocks_per_request": 8, "max_batch_tokens": 64}
    config |= {"max_requests_per_batch": 8, "return_logprobs": True, "compilation_cache": False, "safety_margin": 0.0}
    if settings.get("cpu_offload_space") == "4 blocks":
        settings["cpu_offload_space"] = 4.5 * lm.session.resolved.block_bytes / 2**30
    prompts, generation = jobs
    outputs = list(lm.generate_batch(prompts, generation, ContinuousBatchingConfig(**(config | settings))).values())
    assert not [output.error for output in outputs if output.error]
    return outputs


@pytest.mark.parametrize(
    ("policy", "sharing"),
    [
        ("fifo", True),
        ("prefill_first", False),
        pytest.param("fifo", False, marks=pytest.mark.slow),
        pytest.param("prefill_first", True, marks=pytest.mark.slow),
    ],
)
def test_invariant_4_a_tight_pool_changes_no_token_and_no_logprob(lm, policy, sharing) -> None:
    jobs = [make_jobs(seed) for seed in range(4)]
    expected = [run(lm, job, allow_block_sharing=False) for job in jobs]
    num_blocks = 9 * len(lm.session.resolved.scheduler.windows)
    tight = {"num_blocks": num_blocks, "scheduler_type": policy, "allow_block_sharing": sharing}
    evictions = {}
    for name, settings in PRESSURE.items():
        evictions[name] = resets, offloads = [], []
        for job, right in zip(jobs, expected, strict=True):
            outputs = run(lm, job, **tight, **settings)
            assert [o.generated_tokens for o in outputs] == [o.generated_tokens for o in right], name
            for output, other in zip(outputs, right, strict=True):
                np.testing.assert_allclose(output.logprobs, other.logprobs, atol=1e-5)
            resets.append(lm.summary.soft_resets)
            offloads.append(lm.summary.offloads)
            assert lm.session.engine.state.pool.num_free == num_blocks
            assert lm.session.engine.state.host_used == 0
            assert not lm.session.device.host_tier or not lm.session.device.host_tier.num_blocks
    (soft, none), (nobody, offload), mixed = ([sum(counts) for counts in both] for both in evictions.values())
    assert soft > 0 == none
    assert offload > 0 == nobody
    assert min(mixed) > 0


def test_what_pressure_cost_is_told(lm) -> None:
    jobs = make_jobs(0)
    groups = len(lm.session.resolved.scheduler.windows)
    run(lm, jobs, num_blocks=9 * groups, allow_block_sharing=False)
    soft = lm.summary
    assert soft.recomputed_tokens > 0
    assert f"{soft.soft_resets} soft resets, {soft.recomputed_tokens} tokens computed again" in str(soft)
    outputs = run(lm, jobs, num_blocks=9 * groups, allow_block_sharing=False, cpu_offload_space=1.0)
    offload = lm.summary
    assert offload.recomputed_tokens == 0
    assert offload.offloads == sum(output.num_offloads for output in outputs) > 0
    stats = lm.session.engine.stats
    block_bytes = lm.session.resolved.block_bytes
    assert offload.copied_bytes == (stats.offloaded_blocks + stats.restored_blocks) * block_bytes
    assert f"{offload.offloads} offloads, " in str(offload)
