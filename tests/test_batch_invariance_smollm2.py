"""A hundred random schedules of the same 24 requests on SmolLM2, in each dtype, bit for bit; run by hand (-m slow)."""

import os
from collections import Counter

import pytest
from schedules import different, make_jobs, run_alone, run_together, session_of

from cbjax import CausalLM

BASE = {
    "block_size": 16,
    "num_blocks": 256,
    "max_blocks_per_request": 16,
    "safety_margin": 0.0,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 16,
}
SMALL = {"block_size": 4, "num_blocks": 42, "max_blocks_per_request": 42}
# Settings, the number of schedules, and what must have been seen in them.
CONFIGS = {
    "roomy": ({"allow_block_sharing": False}, 16, {"decode", "mixed"}),
    "cached": ({}, 20, {"cached"}),
    "chunks of 7": ({"max_batch_tokens": 7, "allow_block_sharing": False}, 4, {"mixed"}),
    "chunks of 7, cached": ({"max_batch_tokens": 7, "num_blocks": 64}, 12, {"cached"}),
    "chunks of 64": ({"max_batch_tokens": 64, "allow_block_sharing": False}, 12, {"decode", "mixed"}),
    # Small blocks, so that requests come to lack some; the bits are compared with those of large ones.
    "soft resets": (SMALL | {"scheduler_type": "prefill_first"}, 12, {"resets"}),
    "offload": ({"num_blocks": 14, "cpu_offload_space": 1.0, "allow_block_sharing": False}, 12, {"offloads"}),
    "offload, cached, chunks of 64": (
        SMALL | {"cpu_offload_space": 1.0, "max_batch_tokens": 64, "scheduler_type": "prefill_first"},
        12,
        {"offloads", "cached"},
    ),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def lm(request):
    model = CausalLM.from_pretrained(os.environ.get("CBJAX_DEMO_MODEL", "demo"), dtype=request.param)
    yield model
    model.close()


@pytest.fixture(scope="module")
def jobs(lm):
    return make_jobs(24, vocab_size=lm.vocab_size, longest=150, new_tokens=12)


@pytest.fixture(scope="module")
def right(lm, jobs):
    session = session_of(lm, **(BASE | {"allow_block_sharing": False}))
    yield run_alone(session.engine, jobs)
    session.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_under_a_hundred_schedules(lm, jobs, right, name) -> None:
    settings, count, must_be_seen = CONFIGS[name]
    session = session_of(lm, **(BASE | settings))
    assert session.proof.differing == {}
    before = sum(settings[1] for settings in list(CONFIGS.values())[: list(CONFIGS).index(name)])
    found = {seed: different(run_together(session.engine, jobs, seed), right) for seed in range(before, before + count)}
    stats = session.engine.stats
    session.close()
    assert not any(found.values()), {seed: dict(differs) for seed, differs in found.items() if differs}
    seen = Counter(resets=stats.soft_resets, offloads=stats.offloads, cached=stats.cached_tokens)
    seen += Counter({bucket.kind: steps for bucket, steps in stats.steps.items()})
    assert seen.keys() >= must_be_seen


def test_a_hundred_schedules_are_a_hundred() -> None:
    assert sum(count for _, count, _ in CONFIGS.values()) == 100
