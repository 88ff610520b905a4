"""`lm.recording()` and `lm.observers`: every step, as it was dispatched, and for good."""

import numpy as np
import pytest

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus, StepRecord
from cbjax.testing import tiny_llama

PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 7, 64, 12, 80, 3], [1, 2], list(range(40, 61))]
GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)
BATCHING = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=64,
    max_blocks_per_request=64,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    allow_block_sharing=False,  # every call computes its prompts anew
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def generate(lm: CausalLM) -> None:
    outputs = lm.generate_batch(PROMPTS, GREEDY, BATCHING, warmup=False, request_ids=list("abcde"))
    assert {output.status for output in outputs.values()} == {RequestStatus.FINISHED}


def assert_is_sound(record: StepRecord) -> None:
    batch, config = record.plan.batch, record.state.config
    assert record.bucket.fits(batch)
    assert record.prefill_tokens + record.decode_tokens == batch.num_tokens <= record.rectangle
    tables = record.block_tables()
    held = np.concatenate(list(tables.values()))
    assert len(set(held.tolist())) == len(held) == config.num_blocks - record.state.pool.num_free
    ends = {record.request_ids[uid]: end for uid, end in zip(batch.uid, batch.start + batch.count, strict=True)}
    assert all(len(tables[name]) == -(-end // config.block_size) for name, end in ends.items())


def test_records_tell_who_ran_and_in_which_blocks(lm):
    seen = []
    lm.observers.append(lambda record: seen.append({name: t.tolist() for name, t in record.block_tables().items()}))
    with lm.recording() as records:
        generate(lm)
    lm.observers.pop()
    for record in records:
        assert_is_sound(record)
    # The values of an early step are still those of that step.
    assert [{name: t.tolist() for name, t in record.block_tables().items()} for record in records] == seen
    assert set().union(*seen) == set("abcde")
    stats = lm.session.engine.stats
    assert sum(record.prefill_tokens for record in records) == stats.prefill_tokens
    assert [record.bucket for record in records].count(records[-1].bucket) == stats.steps[records[-1].bucket]
    assert sum(int(record.plan.batch.emits.sum()) for record in records) == 6 * len(PROMPTS)
    assert max(sum(map(len, tables.values())) for tables in seen) == stats.peak_blocks
    times = [record.dispatched for record in records]
    assert times == sorted(times)


def test_the_rectangle_is_as_wide_as_the_longest_row(lm):
    with lm.recording() as records:
        generate(lm)
    assert [(r.prefill_tokens, r.decode_tokens, r.rectangle) for r in records] == [(36, 0, 5 * 21)] + [(0, 5, 5)] * 5


def test_a_record_prints_as_one_line(lm):
    with lm.recording() as records:
        generate(lm)
    assert repr(records[0]) == (
        "StepRecord(mixed(64 tokens, 8 rows): 36 prefill and 0 decode tokens in 5 rows, 5 admitted, 0 evicted)"
    )


def test_only_steps_of_the_block_are_recorded_and_streams_are_too(lm):
    with lm.recording() as outer:
        generate(lm)
        with lm.recording() as inner:
            list(lm.stream([7, 8], GREEDY, BATCHING))
    generate(lm)
    assert len(inner) == 6
    assert outer[-6:] == inner
    assert lm.observers == []


def test_an_observer_that_raises_ends_the_call_and_not_the_model(lm):
    def broken(record: StepRecord) -> None:
        raise RuntimeError("no place for records")

    lm.observers.append(broken)
    with pytest.raises(RuntimeError, match="no place for records"):
        generate(lm)
    lm.observers.clear()
    assert {output.status for output in lm.last_outputs.values()} == {RequestStatus.FAILED}
    generate(lm)
    assert lm.session.engine.state.pool.num_free == 64
