"""The engine over the history-hash device, with none to three steps in flight."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from engines import GREEDY, expected, finish, make_engine, submit
from machines import DEPTHS, POLICIES, VOCAB_SIZE, Windows, make_prompt

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.requests import RequestStatus
from cbjax.sampling import SamplingParams
from cbjax.testing import solo_run

# Pools in which one request of 28 tokens just fits.
POOLS = [((None,), 7), ((None, 6), 10), ((5,), 7), ((None, 2, 9), 12)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("windows", "num_blocks"), POOLS)
def test_outputs_on_tight_pools_equal_solo_runs(windows: Windows, num_blocks: int, policy: str, depth: int) -> None:
    num_resets = 0
    pool = {"windows": windows, "num_blocks": num_blocks}
    for seed in range(8):
        rng = random.Random(seed)
        engine = make_engine(depth=depth, policy=policy, max_batch_tokens=rng.choice([5, 16, 64]), **pool)
        runs = []
        for i in range(8):
            prompt = rng.randint(1, 14)
            eos = tuple(range(rng.choice([0, 40])))
            sampling = SamplingParams(do_sample=True, seed=i)
            request = submit(engine, f"r{i}", make_prompt(prompt, i), rng.randint(1, 28 - prompt), eos, sampling)
            runs.append((request, eos, sampling))
            if rng.random() < 0.5:
                engine.step()
        finish(engine)
        for request, eos, sampling in runs:
            tokens = expected(request, eos, sampling)
            assert request.generated_tokens == tokens
            assert request.status is RequestStatus.FINISHED
            assert request.finish_reason == ("stop" if tokens[-1] in eos else "length")
            num_resets += request.num_soft_resets
        assert engine.stats.soft_resets == sum(request.num_soft_resets for request, _, _ in runs)
    assert num_resets > 10 or None not in windows


@pytest.mark.parametrize("depth", DEPTHS)
def test_answers_are_read_when_more_steps_are_in_flight_than_the_depth(depth: int) -> None:
    engine = make_engine(depth=depth)
    request = submit(engine, "a", 3, 6)
    for _ in range(depth):
        assert engine.step() == []
    assert not request.generated_tokens
    for tokens in range(1, 7 - depth):
        assert engine.step() == [request]
        assert len(request.generated_tokens) == tokens
    assert request.uid in engine.alive or not depth
    finish(engine)
    assert request.generated_tokens == expected(request)


def test_status_follows_a_request_through_chunks_decode_reset_and_end() -> None:
    engine = make_engine(num_blocks=4, max_batch_tokens=10)
    first, second = submit(engine, "a", 8, 8), submit(engine, "b", 14, 2)
    assert first.status is second.status is RequestStatus.PENDING
    engine.step()
    assert (first.status, second.status) == (RequestStatus.DECODING, RequestStatus.PREFILLING)
    seen = []
    while not engine.is_idle:
        engine.step()
        seen.append((first.status.name, second.status.name))
    assert list(dict.fromkeys(seen)) == [
        ("DECODING", "PREFILLING"),
        ("DECODING", "PENDING"),
        ("FINISHED", "PENDING"),
        ("FINISHED", "PREFILLING"),
        ("FINISHED", "DECODING"),
        ("FINISHED", "FINISHED"),
    ]
    assert second.num_soft_resets == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_times_and_logprobs_survive_soft_resets(depth: int) -> None:
    engine = make_engine(depth=depth, num_blocks=7)
    sampling = SamplingParams(logprobs=True)
    requests = [submit(engine, f"r{i}", make_prompt(2, i), 16, sampling=sampling) for i in range(5)]
    finish(engine)
    for request in requests:
        output = request.snapshot()
        assert output.is_finished()
        assert len(output.timestamps) == len(output.logprobs) == len(output.generated_tokens) == 16
        assert output.timestamps == sorted(output.timestamps)
        started, ended = output.lifespan
        assert 0 <= started <= output.timestamps[0] <= output.timestamps[-1] <= ended
        assert output.time_to_first_token == output.timestamps[0]
    assert max(request.num_soft_resets for request in requests) == 3
    assert submit(engine, "later", 3).snapshot().lifespan == (-1.0, -1.0)


def test_snapshots_do_not_change_afterwards() -> None:
    engine = make_engine()
    request = submit(engine, "a", 5, 4)
    engine.step()
    early = request.snapshot()
    finish(engine)
    assert (len(early.generated_tokens), early.status) == (1, RequestStatus.DECODING)
    assert len(request.snapshot().generated_tokens) == 4


def test_stats_count_steps_tokens_resets_and_blocks() -> None:
    engine = make_engine(num_blocks=4, max_batch_tokens=10)
    submit(engine, "a", 8, 8)
    submit(engine, "b", 14, 2)
    finish(engine)
    stats = engine.stats
    assert stats.soft_resets == 1
    assert stats.recomputed_tokens == 2  # the chunk that the second had before its reset
    assert stats.prefill_tokens == 8 + 14 + 2
    assert stats.peak_blocks == 4
    # Chunks of 8 + 2, then 7 decodes; after the end of the first: chunks of 10 and 4, a decode.
    assert sum(stats.steps.values()) == 1 + 7 + 2 + 1
    assert sum(count for bucket, count in stats.steps.items() if bucket.kind == "decode") == 8


BAD_PROMPTS = [
    ([], ValueError, "at least one token"),
    (np.zeros(0, np.int32), ValueError, "at least one token"),
    ([3, -1], ValueError, r"must be in \[0, 997\).*got \[-1\]"),
    ([3, VOCAB_SIZE], ValueError, r"must be in \[0, 997\).*got \[997\]"),
    (np.array([2**63], np.uint64), ValueError, "vocabulary"),
    ([2**70], TypeError, "flat sequence of int"),
    ([1.0, 2.0], TypeError, "flat sequence of int"),
    ([[1, 2]], TypeError, "flat sequence of int"),
    ([[1, 2], [3]], TypeError, "flat sequence of int"),
    ([True, False], TypeError, "flat sequence of int"),
    (["1"], TypeError, "flat sequence of int"),
    ("text", TypeError, "flat sequence of int"),
    (None, TypeError, "flat sequence of int"),
    (7, TypeError, "flat sequence of int"),
]


@pytest.mark.parametrize(("prompt", "error", "match"), BAD_PROMPTS, ids=lambda value: str(value)[:20])
def test_invariant_6_a_bad_prompt_is_refused_and_harms_nobody(prompt, error: type, match: str) -> None:
    """Case B29 (empty) and B28 (ids outside the vocabulary), too."""
    engine = make_engine()
    first = submit(engine, "a", 5, 6)
    engine.step()
    state, alive = engine.state, dict(engine.alive)
    with pytest.raises(error, match=match):
        engine.submit("bad", prompt, max_new_tokens=3, eos_token_ids=(), sampling=GREEDY)
    assert engine.state is state
    assert engine.alive == alive
    again = submit(engine, "bad", 4, 3)
    finish(engine)
    assert first.generated_tokens == expected(first)
    assert again.generated_tokens == expected(again)


@pytest.mark.parametrize("eos", [-2, VOCAB_SIZE, 2**31, 2**70])
def test_invariant_6_an_eos_id_outside_the_vocabulary_is_refused_and_harms_nobody(eos: int) -> None:
    engine = make_engine()
    first = submit(engine, "a", 5, 6)
    engine.step()
    with pytest.raises(ValueError, match=r"EOS ids must be in \[0, 997\)"):
        submit(engine, "bad", 5, 6, eos=(3, eos))
    finish(engine)
    assert first.generated_tokens == expected(first)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, list])
def test_prompts_of_any_integer_type_are_the_same(dtype) -> None:
    engine = make_engine()
    ids = [5, 250, 17]
    source = ids if dtype is list else np.array(ids, dtype)
    request = submit(engine, "a", source, 3)
    if dtype is not list:
        source[:] = 0  # what the caller does with its array later is its own affair
    finish(engine)
    assert request.generated_tokens == solo_run(np.array(ids), GREEDY.pack(), 3, vocab_size=VOCAB_SIZE)


def test_invariant_6_nan_logits_fail_their_request_alone() -> None:
    engine = make_engine()
    device, forward = engine.device, engine.device.forward
    poisoned = 1

    def with_nan(batch: BatchDescriptor, bucket: Bucket) -> SimpleNamespace:
        answer = forward(batch, bucket)
        return SimpleNamespace(
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            finite=((batch.uid != poisoned) | (batch.output_index < 2))[None],
        )

    device.forward = with_nan
    requests = [submit(engine, name, make_prompt(5, i), 6) for i, name in enumerate("abc")]
    finish(engine)
    assert [request.status.name for request in requests] == ["FINISHED", "FAILED", "FINISHED"]
    assert requests[1].finish_reason == "failed"
    assert requests[1].error is not None
    assert "not finite" in requests[1].error
    assert requests[1].generated_tokens == expected(requests[1])[:2]
    for request in (requests[0], requests[2]):
        assert request.generated_tokens == expected(request)


def test_without_a_limit_a_request_ends_where_positions_or_pool_end() -> None:
    engine = make_engine(num_blocks=5, max_positions=4096)
    by_pool = submit(engine, "a", 7, None)
    finish(engine)
    assert len(by_pool.generated_tokens) == 5 * 4 - 7 + 1
    assert by_pool.finish_reason == "length"
    engine = make_engine(max_positions=15)
    by_positions = submit(engine, "a", 7, None)
    finish(engine)
    assert len(by_positions.generated_tokens) == 8
    with pytest.raises(ValueError, match=r"need 41 cells.*can hold 20"):
        submit(make_engine(num_blocks=5), "a", 41, None)
