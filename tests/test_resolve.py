"""`resolve`: a pure function from settings, hints and made-up machines to what is used; its report (invariant 8)."""

import dataclasses
import re

import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.machine import MachineFacts, machine_facts
from cbjax.resolve import UNHINTED_CPU_TOKENS, ModelFacts, resolve
from cbjax.testing import tiny_llama

GIB = 1 << 30
CPU = MachineFacts(platform="cpu", device="cpu", free_bytes=20 * GIB, source="the operating system")
GPU = MachineFacts(platform="gpu", device="H200", free_bytes=100 * GIB, source="the device's memory statistics")
TPU = MachineFacts(platform="tpu", device="v5e", free_bytes=12 * GIB, source="the device's memory statistics")
# About the demo model: 30 layers of 3 heads of 64 in float32, 49,152 ids.
MODEL = ModelFacts(block_bytes_per_token=46_080, token_bytes=73_728, row_bytes=786_432, max_positions=8192)
NONE = WorkloadHints()
# Hints with which the memory alone bounds the pool; a CPU's is bounded without hints, too.
WITHOUT_BOUND = {
    CPU: WorkloadHints(max_prompt_length=8000, max_generated_length=192, num_requests=1024),
    GPU: NONE,
    TPU: NONE,
}


def used(field, config=None, hints=NONE, machine=CPU, model=MODEL):
    """A field's decision: what is used, and why."""
    resolved = resolve(config or ContinuousBatchingConfig(), hints, machine, model)
    (decision,) = [decision for decision in resolved.decisions if decision.field == field]
    return decision.used, decision.why


def blocks(config=None, hints=NONE, machine=CPU, model=MODEL):
    return resolve(config or ContinuousBatchingConfig(), hints, machine, model).scheduler.num_blocks


def hinted(prompt, generated, requests):
    return WorkloadHints(max_prompt_length=prompt, max_generated_length=generated, num_requests=requests)


# Platforms.


@pytest.mark.parametrize(
    ("machine", "tokens", "rows", "percent"),
    [(CPU, 512, 64, 0.6), (GPU, 8192, 1024, 0.9), (TPU, 8192, 1024, 0.9)],
    ids=["cpu", "gpu", "tpu"],
)
def test_defaults_by_platform(machine, tokens, rows, percent):
    scheduler = resolve(ContinuousBatchingConfig(block_size=16), NONE, machine, MODEL).scheduler
    assert (scheduler.max_batch_tokens, scheduler.max_requests_per_batch) == (tokens, rows)
    assert used("max_memory_percent", machine=machine)[0] == percent
    assert f"{machine.free_bytes * percent / GIB:.2f} GiB" in used("max_memory_percent", machine=machine)[1]


def test_the_same_arguments_give_the_same_answer():
    config, hints = ContinuousBatchingConfig(), hinted(100, 20, 5)
    assert resolve(config, hints, GPU, MODEL) == resolve(config, hints, GPU, MODEL)
    assert resolve(config, hints, GPU, MODEL).config is config


def test_the_real_machine_has_facts():
    facts = machine_facts()
    assert facts.platform == "cpu"
    assert facts.free_bytes > 1 << 20
    assert facts.source
    assert facts.device


# The pool.


@pytest.mark.parametrize("machine", [CPU, GPU, TPU])
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_without_hints_the_pool_takes_what_is_left_and_never_more(machine, block_size):
    resolved = resolve(ContinuousBatchingConfig(block_size=block_size), WITHOUT_BOUND[machine], machine, MODEL)
    scheduler = resolved.scheduler
    percent = 0.6 if machine is CPU else 0.9
    temporaries = scheduler.max_batch_tokens * MODEL.token_bytes
    assert resolved.num_bytes == (scheduler.num_blocks + 2) * block_size * MODEL.block_bytes_per_token
    assert resolved.num_bytes + temporaries <= percent * machine.free_bytes
    # Beside rows of logits nothing else is set aside.
    set_aside = temporaries + 1024 * MODEL.row_bytes
    assert resolved.num_bytes + set_aside + block_size * MODEL.block_bytes_per_token > percent * machine.free_bytes


@pytest.mark.parametrize("machine", [CPU, GPU, TPU])
@pytest.mark.parametrize("block_size", [4, 16, 256])
@pytest.mark.parametrize(("prompt", "generated", "requests"), [(1, 1, 1), (100, 28, 1), (100, 29, 7), (2000, 100, 60)])
def test_the_pool_is_never_larger_than_the_hints_need(machine, block_size, prompt, generated, requests):
    config, hints = ContinuousBatchingConfig(block_size=block_size), hinted(prompt, generated, requests)
    need = -(-(prompt + generated) // block_size) * requests
    assert blocks(config, hints, machine) == min(need, blocks(config, WITHOUT_BOUND[machine], machine))
    assert blocks(config, hints, CPU) <= need


@pytest.mark.parametrize("block_size", [4, 256])
def test_without_hints_a_cpu_keeps_most_of_its_memory(block_size):
    config = ContinuousBatchingConfig(block_size=block_size)
    assert blocks(config) == UNHINTED_CPU_TOKENS // block_size
    assert "no hints" in used("num_blocks", config)[1]
    small = dataclasses.replace(CPU, free_bytes=GIB)
    assert blocks(config, machine=small) < UNHINTED_CPU_TOKENS // block_size
    assert "what fits" in used("num_blocks", config, machine=small)[1]


def test_one_prompt_does_not_take_the_memory_of_the_machine():
    resolved = resolve(ContinuousBatchingConfig(), hinted(128, 256, 1), CPU, MODEL)
    assert resolved.num_bytes < GIB // 16
    assert "workload" in used("num_blocks", hints=hinted(128, 256, 1))[1]


def test_more_requests_than_rows_need_no_more_than_the_rows():
    config = ContinuousBatchingConfig(block_size=16, max_requests_per_batch=4)
    assert blocks(config, hinted(16, 16, 1000)) == 2 * 4


def test_hints_beyond_the_models_positions_need_no_more_than_those():
    config = ContinuousBatchingConfig(block_size=16)
    assert blocks(config, hinted(90_000, 10_000, 1)) == MODEL.max_positions // 16


def test_hints_of_lengths_alone_are_for_every_row():
    config = ContinuousBatchingConfig(block_size=16, max_requests_per_batch=8)
    assert blocks(config, hinted(30, 2, 0)) == 2 * 8


def test_an_explicit_pool_is_taken_as_it_is():
    config = ContinuousBatchingConfig(num_blocks=7, block_size=16)
    for hints in (NONE, hinted(1, 1, 1), hinted(4000, 4000, 100)):
        assert used("num_blocks", config, hints)[0] == blocks(config, hints) == 7


@pytest.mark.parametrize("machine", [CPU, GPU, TPU])
def test_an_explicit_pool_that_does_not_fit_is_refused_with_numbers_and_knobs(machine):
    fits = blocks(hints=WITHOUT_BOUND[machine], machine=machine)
    tokens, rows = used("max_batch_tokens", machine=machine)[0], used("max_requests_per_batch", machine=machine)[0]
    explicit = ContinuousBatchingConfig(num_blocks=fits, max_batch_tokens=tokens, max_requests_per_batch=rows)
    assert blocks(explicit, machine=machine) == fits
    with pytest.raises(ValueError, match="must fit into memory") as refused:
        resolve(dataclasses.replace(explicit, num_blocks=2 * fits), NONE, machine, MODEL)
    for part in (f"num_blocks={2 * fits}", "max_batch_tokens", "max_requests_per_batch", "max_memory_percent"):
        assert part in str(refused.value)
    assert re.search(r"hold \d+", str(refused.value))


@pytest.mark.parametrize("free", [0, 1 << 20, 10 << 20])
@pytest.mark.parametrize("hints", [NONE, hinted(10, 10, 1)])
def test_a_machine_without_memory_is_refused_with_the_knobs(free, hints):
    machine = dataclasses.replace(TPU, free_bytes=free)
    with pytest.raises(ValueError, match="num_blocks=1 blocks") as refused:
        resolve(ContinuousBatchingConfig(), hints, machine, MODEL)
    for knob in ("max_batch_tokens", "max_requests_per_batch", "max_memory_percent"):
        assert knob in str(refused.value)


def test_lowering_the_named_knobs_helps():
    machine = dataclasses.replace(CPU, free_bytes=64 << 20)
    with pytest.raises(ValueError, match="lower num_blocks, max_batch_tokens or max_requests_per_batch"):
        resolve(ContinuousBatchingConfig(), NONE, machine, MODEL)
    small = ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=8, block_size=16)
    assert blocks(small, machine=machine) > 10


def test_less_memory_means_fewer_blocks_and_a_larger_share_more():
    half = dataclasses.replace(GPU, free_bytes=GPU.free_bytes // 2)
    assert blocks(machine=half) < blocks(machine=GPU)
    assert blocks(ContinuousBatchingConfig(max_memory_percent=0.45), machine=GPU) == blocks(machine=half)
    assert blocks(ContinuousBatchingConfig(max_memory_percent=0.95), machine=GPU) > blocks(machine=GPU)


# Budgets.


def test_the_token_budget_shrinks_with_memory_down_to_256():
    for free, expected in ((100 * GIB, 8192), (1 * GIB, None), (60 << 20, 256)):
        machine = dataclasses.replace(GPU, free_bytes=free)
        config = ContinuousBatchingConfig(block_size=16, max_requests_per_batch=8)
        tokens, why = used("max_batch_tokens", config, machine=machine)
        if expected is None:
            assert 256 < tokens < 8192
            assert tokens * MODEL.token_bytes <= 0.25 * 0.9 * free
            assert "memory" in why
        else:
            assert tokens == expected
    assert used("max_batch_tokens", ContinuousBatchingConfig(max_batch_tokens=33))[0] == 33


@pytest.mark.parametrize(
    ("asked", "tokens", "num_blocks", "rows"),
    [
        (None, 512, 1000, 64),
        (None, 16, 1000, 16),
        (None, 512, 10, 10),
        (None, 512, 1, 2),
        (9, 512, 1000, 9),
        (99, 16, 1000, 16),
    ],
)
def test_rows_are_at_most_the_tokens_and_by_default_the_blocks(asked, tokens, num_blocks, rows):
    config = ContinuousBatchingConfig(
        max_requests_per_batch=asked, max_batch_tokens=tokens, num_blocks=num_blocks, block_size=4
    )
    assert used("max_requests_per_batch", config)[0] == rows
    assert resolve(config, NONE, CPU, MODEL).scheduler.max_requests_per_batch == rows


# The block table.


@pytest.mark.parametrize(("prompt", "generated", "columns"), [(30_000, 2_000, 126), (4_000, 500, 20)])
def test_columns_come_from_the_hints(prompt, generated, columns):
    config = ContinuousBatchingConfig(num_blocks=1000)
    assert used("max_blocks_per_request", config, hinted(prompt, generated, 1), GPU)[0] == columns


def test_columns_without_hints_hold_8192_tokens():
    for block_size, columns in ((256, 32), (512, 32), (16, 512), (4, 2048)):
        config = ContinuousBatchingConfig(num_blocks=4096, block_size=block_size)
        large = dataclasses.replace(GPU, free_bytes=1000 * GIB)
        assert used("max_blocks_per_request", config, machine=large)[0] == columns


def test_columns_are_at_most_the_pool():
    config = ContinuousBatchingConfig(num_blocks=10)
    assert used("max_blocks_per_request", config) == (10, "no request can hold more than the pool")
    wide = dataclasses.replace(config, max_blocks_per_request=12)
    assert used("max_blocks_per_request", wide) == (10, "no request can hold more than the pool")
    narrow = dataclasses.replace(config, max_blocks_per_request=9)
    assert used("max_blocks_per_request", narrow) == (9, "as asked")


def test_zero_columns_mean_no_decode_programs():
    config = ContinuousBatchingConfig(max_blocks_per_request=0)
    resolved = resolve(config, hinted(100, 28, 4), CPU, MODEL)
    assert resolved.ladder.decode == ()
    assert resolved.ladder.mixed
    assert resolved.scheduler.max_blocks_per_request == 2
    assert "without decode programs" in used("max_blocks_per_request", config, hinted(100, 28, 4))[1]


# Policies.


@pytest.mark.parametrize(("name", "margin"), [("fifo", 0.15), ("prefill_first", 0.0)])
def test_the_margin_comes_with_the_policy_unless_it_is_given(name, margin):
    config = ContinuousBatchingConfig(scheduler_type=name)
    scheduler = resolve(config, NONE, CPU, MODEL).scheduler
    assert (scheduler.policy.name, scheduler.safety_margin) == (name, margin)
    for given in (0.0, 0.5, 1.0):
        asked = dataclasses.replace(config, safety_margin=given)
        assert resolve(asked, NONE, CPU, MODEL).scheduler.safety_margin == given


# The ladder.


@pytest.mark.parametrize(("level", "used_level", "programs"), [(0, 2, 9), (1, 1, 7), (2, 2, 9), (3, 3, 16)])
def test_the_compile_level_sets_the_number_of_programs_and_is_reported(level, used_level, programs):
    config = ContinuousBatchingConfig(default_compile_level=level, num_blocks=512)
    assert len(resolve(config, NONE, CPU, MODEL).ladder.buckets) == programs
    value, why = used("default_compile_level", config)
    assert value == used_level
    assert why.startswith(f"{programs} step programs")


def test_buckets_that_are_asked_for_end_with_the_largest_step_that_can_come():
    config = ContinuousBatchingConfig(decode_buckets=[4, 48], mixed_buckets=[96], num_blocks=512)
    assert [str(bucket) for bucket in resolve(config, NONE, CPU, MODEL).ladder.buckets] == [
        "decode(4)", "decode(48)", "decode(64)", "mixed(96 tokens, 64 rows)", "mixed(512 tokens, 64 rows)",
    ]  # fmt: skip
    assert used("decode_buckets", config) == ("4,48,64", "up to the largest step that can come")
    few = dataclasses.replace(config, num_blocks=10)
    assert used("decode_buckets", few)[0] == "4,10", "ten blocks are for ten rows"
    assert used("mixed_buckets", dataclasses.replace(config, mixed_buckets=(96, 512))) == ("96,512", "as asked")


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("decode_buckets", (2, 65), "max_requests_per_batch=65"),
        ("mixed_buckets", (64, 1024), "max_batch_tokens=1024"),
    ],
)
def test_a_bucket_above_a_budget_that_nobody_gave_is_refused_with_the_remedy(field, value, remedy):
    with pytest.raises(ValueError, match=f"{field} must not go above .*; got .*{remedy}"):
        resolve(ContinuousBatchingConfig(**{field: value}), NONE, CPU, MODEL)


# The report.


# How far the host runs ahead.


@pytest.mark.parametrize(
    ("settings", "machine", "depth", "window"),
    [
        ({}, CPU, 0, 1),
        ({}, GPU, 1, 8),
        ({}, TPU, 1, 8),
        ({"use_async_batching": False}, GPU, 0, 8),
        ({"use_async_batching": True}, CPU, 1, 1),
        ({"async_depth": 3}, CPU, 3, 1),
        ({"use_async_batching": True, "async_depth": 2}, GPU, 2, 8),
        ({"decode_window": 4}, CPU, 0, 4),
        ({"decode_window": 1}, GPU, 1, 1),
        ({"decode_window": 4, "max_blocks_per_request": 0}, GPU, 1, 1),
    ],
)
def test_how_far_the_host_runs_ahead(settings, machine, depth, window):
    overlap = resolve(ContinuousBatchingConfig(**settings), NONE, machine, MODEL).overlap
    assert (overlap.depth, overlap.window) == (depth, window)


def test_invariant_8_a_window_that_cannot_be_is_reported():
    config = ContinuousBatchingConfig(decode_window=4, max_blocks_per_request=0)
    assert used("decode_window", config, machine=GPU) == (
        1,
        "not given: max_blocks_per_request=0 leaves the decode programs out",
    )


def test_steps_in_flight_where_every_dispatch_waits_are_refused_and_not_chosen():
    waits = dataclasses.replace(CPU, dispatches_ahead=False)
    assert used("use_async_batching", machine=waits)[0] is False
    assert "jax_cpu_enable_async_dispatch" in used("use_async_batching", machine=waits)[1]
    for settings in ({"use_async_batching": True}, {"async_depth": 1}):
        with pytest.raises(ValueError, match="cpu is not, since jax_cpu_enable_async_dispatch is off"):
            resolve(ContinuousBatchingConfig(**settings), NONE, waits, MODEL)


def test_invariant_8_every_field_is_in_the_report_once():
    report = resolve(ContinuousBatchingConfig(), NONE, CPU, MODEL).report()
    named = [line.split()[0] for line in report.splitlines()[1:]]
    assert len(named) == len(set(named))
    # The session adds these, which are nothing to decide from a machine's facts alone.
    elsewhere = {"attn_implementation", "compilation_cache"}
    named = [name for name in named if name not in ("pool:", "programs:")]
    assert set(named) | elsewhere == {f.name for f in dataclasses.fields(ContinuousBatchingConfig)}


def test_invariant_8_the_report_shows_what_was_asked_and_what_is_used():
    config = ContinuousBatchingConfig(num_blocks=11, max_requests_per_batch=99, max_batch_tokens=16, block_size=8)
    lines = {line.split()[0]: line for line in resolve(config, NONE, CPU, MODEL).report().splitlines()}
    for field, asked, given in (
        ("num_blocks", 11, 11),
        ("max_requests_per_batch", 99, 16),
        ("max_batch_tokens", 16, 16),
    ):
        assert lines[field].split()[1:3] == [str(asked), str(given)]
    assert "at most max_batch_tokens" in lines["max_requests_per_batch"]
    assert lines["setting"].split() == ["setting", "asked", "used", "why"]


ASKED_AND_NOT_GIVEN = {
    "max_requests_per_batch": ({"max_requests_per_batch": 2000, "max_batch_tokens": 64}, 64),
}


@pytest.mark.parametrize("field", ASKED_AND_NOT_GIVEN)
def test_invariant_8_whatever_is_asked_for_and_not_given_has_a_reason(field):
    settings, given = ASKED_AND_NOT_GIVEN[field]
    value, why = used(field, ContinuousBatchingConfig(**settings))
    assert value == given
    assert why not in ("", "as asked")


def test_invariant_8_what_is_off_as_asked_is_not_called_a_loss():
    assert used("allow_block_sharing", ContinuousBatchingConfig(allow_block_sharing=False)) == (False, "off, as asked")


def test_invariant_8_the_report_of_a_session_is_that_of_what_runs():
    lm = tiny_llama()
    config = ContinuousBatchingConfig(block_size=4, max_batch_tokens=16, compilation_cache=False)
    lm.generate_batch([], GenerationConfig(), config)
    resolved, device = lm.session.resolved, lm.session.device
    report = resolved.report()
    assert sum(array.nbytes for array in device.cache.kv) == resolved.num_bytes
    assert device.cache.num_blocks == resolved.scheduler.num_blocks
    assert re.search(r"^compilation_cache +False +off, as asked", report, re.MULTILINE)
    assert lm.session.engine.state.config == resolved.scheduler
    lm.close()
