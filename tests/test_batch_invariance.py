"""`batch_invariant=True`: a request's tokens and logprobs have the same bits however it was scheduled."""

from collections import Counter

import pytest
from pressed_models import NAMES, make
from schedules import different, make_jobs, run_alone, run_together, session_of

POOL = {"block_size": 4, "num_blocks": 256, "max_blocks_per_request": 48, "safety_margin": 0.0}
STEP = {"max_batch_tokens": 64, "max_requests_per_batch": 8}
# By whether there is a group with a window: the longest request needs 45 blocks, and 19 there.
TIGHT = {False: 48, True: 66}
CONFIGS = {
    "roomy": {"allow_block_sharing": False},
    "chunks of 7, cached prefixes": {"max_batch_tokens": 7},
    "soft resets": {"scheduler_type": "prefill_first"},
    "offload": {"cpu_offload_space": 1.0, "scheduler_type": "prefill_first", "allow_block_sharing": False},
    "windows, two in flight": {"use_async_batching": True, "async_depth": 2, "decode_window": 16},
}
UNDER_PRESSURE = ("soft resets", "offload")


@pytest.fixture(scope="module", params=NAMES)
def lm(request):
    model = make(request.param)
    yield model
    model.close()


def test_a_requests_bits_are_the_same_under_every_schedule(lm) -> None:
    jobs = make_jobs(12, vocab_size=258, longest=150, new_tokens=30)
    right, seen = {}, Counter()
    for number, (name, settings) in enumerate(CONFIGS.items()):
        config = POOL | STEP | settings
        if name in UNDER_PRESSURE:
            config["num_blocks"] = TIGHT[bool(lm.config.windows)]
        session = session_of(lm, **config)
        assert session.proof.differing == {}
        right = right or run_alone(session.engine, jobs)
        for seed in range(2):
            assert not different(run_together(session.engine, jobs, 10 * number + seed), right), (name, seed)
        stats = session.engine.stats
        seen += Counter(resets=stats.soft_resets, offloads=stats.offloads, cached=stats.cached_tokens)
        seen += Counter({bucket.kind: count for bucket, count in stats.steps.items()}, windows=stats.windows.total())
        session.close()
    assert seen.keys() >= {"resets", "offloads", "cached", "decode", "mixed", "windows"}
