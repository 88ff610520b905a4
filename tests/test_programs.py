"""Invariant 7: the compiled programs are known from the ladder, and none is compiled after warm-up."""

import dataclasses

import jax
import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus, WorkloadHints
from cbjax.descriptor import Bucket
from cbjax.engine import Engine
from cbjax.inputs import hints_of, prepare
from cbjax.machine import MachineFacts
from cbjax.programs import StrictModeError
from cbjax.resolve import ModelFacts, resolve
from cbjax.sampling import SamplingParams
from cbjax.session import reachable_buckets
from cbjax.testing import HistoryHashDevice, tiny_llama

GREEDY = GenerationConfig(max_new_tokens=4, eos_token_id=-1)
MACHINE = MachineFacts(platform="cpu", device="made up", free_bytes=1 << 34, source="a test")
MODEL = ModelFacts(block_bytes_per_token=256, token_bytes=4096, row_bytes=4096, max_positions=256)


def batching(**settings):
    pool = {"block_size": 4, "num_blocks": 64, "max_blocks_per_request": 64}
    step = {"max_batch_tokens": 64, "max_requests_per_batch": 8}
    return ContinuousBatchingConfig(**(pool | step | {"compilation_cache": False} | settings))


def decode(rows):
    return Bucket(kind="decode", tokens=rows, rows=rows)


def mixed(tokens, rows):
    return Bucket(kind="mixed", tokens=tokens, rows=rows)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def random_requests(count, seed):
    """Prompts of 1 to 59 tokens and every kind of setting."""
    rng = np.random.default_rng(seed)
    kinds = [{}, {"temperature": 0.8}, {"top_k": 20, "seed": 3}, {"top_p": 0.7}, {"do_sample": True}]
    prompts = [rng.integers(258, size=rng.integers(1, 60)).tolist() for _ in range(count)]
    configs = [GenerationConfig(max_new_tokens=int(rng.integers(1, 12)), **kinds[i % 5]) for i in range(count)]
    return prompts, configs


# The real model.


def test_b45_invariant_7_nothing_is_compiled_after_warm_up(lm, caplog):
    config = batching(max_batch_tokens=128)
    lm.generate_batch([], GREEDY, config)
    session = lm.session
    compiled = session.warmup()
    names = {"block-table entries", "copies of blocks", "decode(2)", "decode(8)"}
    names |= {"mixed(64 tokens, 8 rows)", "mixed(128 tokens, 8 rows)"}
    assert {program.name for program in session.device.programs.values()} == names
    assert all(program.seconds > 0 and program in session.device.programs.values() for program in compiled)
    assert session.warmup() == []
    session.device.strict = True
    prompts, configs = random_requests(200, seed=0)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for first, last, logprobs in ((0, 1, True), (1, 4, False), (4, 200, True)):
            settings = dataclasses.replace(config, return_logprobs=logprobs, seed=first)
            outputs = lm.generate_batch(prompts[first:last], configs[first:last], settings)
            assert all(output.status == RequestStatus.FINISHED for output in outputs.values())
            assert lm.summary.compiled == 0
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x + 1)(1)
        assert "ompil" in caplog.text, "jax no longer logs what it compiles"
    assert lm.session is session
    assert set(session.device.programs) == {"table", "copy", decode(2), decode(8), mixed(64, 8), mixed(128, 8)}


def test_strict_mode_names_the_program_that_is_missing(lm):
    config = batching(max_batch_tokens=32)
    lm.generate_batch([], GREEDY, config)
    lm.session.warmup([mixed(64, 8)])
    lm.session.device.strict = True
    with pytest.raises(StrictModeError, match=r"decode\(2\)"):
        lm.generate_batch([[1, 2]], GREEDY, config, warmup=False)
    (output,) = lm.last_outputs.values()
    assert (output.status, len(output.generated_tokens)) == (RequestStatus.FAILED, 1)
    with pytest.raises(StrictModeError, match=r"decode\(2\)"):
        lm.generate_batch([[1, 2]], GREEDY, config)
    lm.session.device.strict = False
    (output,) = lm.generate_batch([[1, 2]], GREEDY, config).values()
    assert len(output.generated_tokens) == 4


def test_one_prompt_compiles_what_it_reaches(lm):
    config = batching(max_batch_tokens=256)
    lm.generate_batch([[1, 2]], GREEDY, config)
    assert lm.session.resolved.ladder.buckets == (decode(2), decode(8), mixed(64, 8), mixed(128, 8), mixed(256, 8))
    assert set(lm.session.device.programs) == {"table", decode(2), mixed(64, 8)}
    assert lm.summary.compiled == 3
    lm.generate_batch([[1] * 70], GREEDY, config)
    assert set(lm.session.device.programs) == {"table", decode(2), mixed(64, 8), mixed(128, 8)}
    assert lm.summary.compiled == 1


def test_without_warm_up_a_program_is_compiled_when_it_is_first_needed(lm):
    one = GenerationConfig(max_new_tokens=1)
    config = batching(max_batch_tokens=16)
    lm.generate_batch([[1, 2], [3]], one, config, warmup=False)
    assert set(lm.session.device.programs) == {"table", mixed(64, 8)}
    assert lm.summary.compiled == 2


def test_temporaries_do_not_grow_with_the_pool_and_the_store_is_updated_in_place(lm):
    programs = {}
    for num_blocks in (64, 4096):
        config = batching(num_blocks=num_blocks)
        lm.generate_batch([[1, 2]], GREEDY, config)
        programs[num_blocks] = dict(lm.session.device.programs)
        store = lm.session.resolved.num_bytes
        # K and V, 2 layers, 2 heads of 8 in float32, and two more blocks.
        assert store == (num_blocks + 2) * 4 * 2 * 2 * 2 * 8 * 4
        for key in (decode(2), mixed(64, 8)):
            analysis = programs[num_blocks][key].call.memory_analysis()
            assert analysis.alias_size_in_bytes >= store
            assert programs[num_blocks][key].temp_bytes < 4 << 20
    for key in (decode(2), mixed(64, 8)):
        assert programs[64][key].temp_bytes == programs[4096][key].temp_bytes > 0


# What a job can reach, on the history-hash device: no step may ever need another program.


def run(prompts, max_new_tokens, **settings):
    """Reachable buckets by the plan, used ones by the run, and the number of soft resets."""
    configs = [GenerationConfig(max_new_tokens=n) for n in max_new_tokens]
    prepared = prepare(prompts, configs, [str(i) for i in range(len(prompts))], None)
    hints = [hints_of([p], MODEL.max_positions) for p in prepared]
    resolved = resolve(batching(**settings), hints_of(prepared, MODEL.max_positions), MACHINE, MODEL)
    scheduler = resolved.scheduler
    device = HistoryHashDevice(
        num_blocks=scheduler.num_blocks,
        block_size=scheduler.block_size,
        num_slots=scheduler.max_requests_per_batch,
        max_blocks=scheduler.max_blocks_per_request,
    )
    engine = Engine(device, scheduler, resolved.ladder, vocab_size=997, max_positions=MODEL.max_positions)
    for p in prepared:
        limit = p.config.max_new_tokens
        engine.submit(p.request_id, p.prompt, max_new_tokens=limit, eos_token_ids=(), sampling=SamplingParams())
    while not engine.is_idle:
        engine.step()
    return set(reachable_buckets(resolved, hints)), set(engine.stats.steps), engine.stats.soft_resets


@pytest.mark.parametrize("budget", [5, 16, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_invariant_7_what_one_prompt_reaches_is_exactly_what_it_uses(budget, new_tokens):
    for length in (1, 2, 4, 5, 6, 15, 16, 17, 33, 63, 64, 65, 66, 100, 101, 128, 129, 200):
        reachable, used, _ = run([[1] * length], [new_tokens], max_batch_tokens=budget)
        assert used == reachable, f"{length} prompt tokens"


@pytest.mark.parametrize("seed", range(30))
def test_invariant_7_what_many_prompts_reach_covers_what_they_use(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 40))
    longest = int(rng.choice([1, 2, 10, 100]))
    prompts = [[1] * int(rng.integers(1, longest + 1)) for _ in range(count)]
    reachable, used, _ = run(
        prompts,
        rng.integers(1, 20, size=count).tolist(),
        max_batch_tokens=int(rng.choice([3, 16, 64, 65, 150, 512])),
        max_requests_per_batch=int(rng.choice([1, 2, 3, 8, 20, 64])),
        num_blocks=int(rng.choice([31, 64, 1000])),
        max_blocks_per_request=None,
        scheduler_type=str(rng.choice(["fifo", "prefill_first"])),
        safety_margin=float(rng.choice([0.0, 0.15])),
    )
    assert used <= reachable


def test_invariant_7_soft_resets_prefill_again_and_that_is_reachable_too():
    # Prompts of 70 tokens in all fit 128; with their outputs the evicted need more.
    reachable, used, resets = run([[i] * 7 for i in range(10)], [60] * 10, max_batch_tokens=512, num_blocks=40)
    assert resets > 0
    assert used <= reachable
    assert max(bucket.tokens for bucket in reachable) == 512


def test_no_request_reaches_nothing():
    resolved = resolve(batching(), WorkloadHints(), MACHINE, MODEL)
    assert reachable_buckets(resolved, []) == ()


def test_the_ladders_of_the_default_budgets():
    demo = resolve(ContinuousBatchingConfig(num_blocks=512), WorkloadHints(), MACHINE, MODEL)
    assert [bucket.rows for bucket in demo.ladder.decode] == [2, 8, 16, 32, 64]
    assert [bucket.tokens for bucket in demo.ladder.mixed] == [64, 128, 256, 512]
    assert len(demo.ladder.buckets) + 1 <= 24, "with the one that writes block-table entries"
    accelerator = dataclasses.replace(MACHINE, platform="tpu")
    default = resolve(ContinuousBatchingConfig(num_blocks=2048), WorkloadHints(), accelerator, MODEL)
    assert [bucket.rows for bucket in default.ladder.decode] == [2, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert [bucket.tokens for bucket in default.ladder.mixed] == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert all(bucket.rows == min(bucket.tokens, 1024) for bucket in default.ladder.mixed)
