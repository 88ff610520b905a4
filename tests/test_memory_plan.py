"""The memory plan: with made-up machines and models its sum never exceeds the budget, and the pool fills it."""

import dataclasses

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.descriptor import Bucket, packed_shape
from cbjax.machine import MachineFacts
from cbjax.memory_plan import ModelFacts, Sizes, plan_memory
from cbjax.resolve import resolve
from cbjax.sampling import NUM_WORDS
from cbjax.testing import tiny_llama

MIB, GIB = 1 << 20, 1 << 30
NONE = WorkloadHints()


def facts(layers, kv_heads, head_dim, heads, vocab, *, itemsize=2, **changes):
    """A decoder's sizes, as `cbjax.session.model_facts` has them."""
    return ModelFacts(
        block_bytes_per_token=2 * layers * kv_heads * head_dim * itemsize,
        token_bytes=32 * heads * head_dim * 4,
        row_bytes=3 * vocab * 4,
        max_positions=131_072,
        **changes,
    )


MODELS = {
    "demo": facts(30, 3, 64, 9, 49_152, itemsize=4),
    "1B": facts(16, 8, 64, 32, 128_256),
    "8B": facts(32, 8, 128, 32, 128_256),
    "70B": facts(80, 8, 128, 64, 128_256),
    "hybrid": facts(13, 4, 256, 16, 262_144, windows=(None, 1024, 1024)),
    "padded": facts(16, 8, 64, 32, 128_256, layout=2.0),
    "on the host": facts(30, 3, 64, 9, 49_152, unplaced_weight_bytes=100 * MIB, weight_bytes=100 * MIB),
}


def plan_of(budget, model, config=None, hints=NONE, platform="gpu"):
    """The plan where the whole of the free memory may be taken."""
    config = dataclasses.replace(config or ContinuousBatchingConfig(), max_memory_percent=1.0)
    machine = MachineFacts(platform=platform, device="made up", free_bytes=budget, source="a test")
    return resolve(config, hints, machine, model)


def fits(budget, model, config):
    """Whether anything useful does: a small budget can be too small for the smallest step of a large model."""
    try:
        return bool(plan_of(budget, model, config))
    except ValueError:
        return False


@settings(max_examples=300, deadline=None)
@given(
    budget=st.integers(256 * MIB, 80 * GIB),
    model=st.sampled_from(list(MODELS)),
    block_size=st.sampled_from([16, 32, 256]),
    tokens=st.sampled_from([None, 64, 2048]),
    rows=st.sampled_from([None, 8, 256]),
    offload=st.sampled_from([0.0, 2.0]),
)
def test_the_sum_never_exceeds_the_budget_and_a_pool_without_bound_fills_it(
    budget, model, block_size, tokens, rows, offload
):
    config = ContinuousBatchingConfig(
        block_size=block_size, max_batch_tokens=tokens, max_requests_per_batch=rows, cpu_offload_space=offload
    )
    block = MODELS[model].block_bytes(block_size)
    if not fits(budget, MODELS[model], config):
        # From 2 GiB up everything fits, but for tokens asked for by name whose activations alone need as much.
        assert budget < max(2 * GIB, 1.05 * (tokens or 0) * MODELS[model].token_bytes)
        return
    resolved = plan_of(budget, MODELS[model], config)
    plan = resolved.memory
    assert plan.total <= plan.budget == budget
    assert plan.total == sum(line.num_bytes for line in plan.lines)
    assert min(line.num_bytes for line in plan.lines) >= 0
    assert resolved.num_bytes == sum(line.num_bytes for line in plan.lines[:2])
    # A block is the smallest piece a pool can grow by, and rows come with blocks.
    assert plan.left <= max(0.05 * budget, block)
    groups = len(MODELS[model].windows)
    assert resolved.scheduler.max_requests_per_batch <= max(2, resolved.scheduler.num_blocks // groups, rows or 0)


@pytest.mark.parametrize("budget", [256 * MIB, GIB, 16 * GIB, 80 * GIB])
def test_small_blocks_bring_the_demo_within_a_hundredth(budget):
    plan = plan_of(budget, MODELS["demo"], ContinuousBatchingConfig(block_size=16)).memory
    assert 0.99 * budget < plan.total <= budget


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(512 * MIB, 80 * GIB),
    prompt=st.integers(1, 4000),
    generated=st.integers(1, 4000),
    requests=st.integers(1, 300),
    platform=st.sampled_from(["cpu", "gpu"]),
)
def test_with_hints_the_pool_is_the_smaller_of_what_fits_and_what_they_need(
    budget, prompt, generated, requests, platform
):
    config = ContinuousBatchingConfig(block_size=16)
    hints = WorkloadHints(max_prompt_length=prompt, max_generated_length=generated, num_requests=requests)
    scheduler = plan_of(budget, MODELS["demo"], config, hints, platform).scheduler
    unbound = WorkloadHints(max_prompt_length=131_000, max_generated_length=72, num_requests=100_000)
    fits = plan_of(budget, MODELS["demo"], config, unbound, platform)
    rows = min(requests, 64 if platform == "cpu" else fits.scheduler.max_requests_per_batch)
    need = -(-(prompt + generated) // 16) * rows
    # What fits depends a little on the hints: a narrower block table leaves more.
    assert scheduler.num_blocks <= need
    assert scheduler.num_blocks >= min(need, fits.scheduler.num_blocks)


def test_rows_that_nobody_asked_for_leave_most_of_a_small_memory_to_the_pool():
    resolved = plan_of(GIB, MODELS["8B"], ContinuousBatchingConfig(block_size=16))
    logits = resolved.scheduler.max_requests_per_batch * MODELS["8B"].row_bytes
    assert 0.24 * GIB < logits <= 0.25 * GIB
    assert resolved.num_bytes > 0.7 * GIB


def test_more_of_anything_leaves_fewer_blocks():
    small = ContinuousBatchingConfig(block_size=16, max_batch_tokens=64, max_requests_per_batch=8)
    most = plan_of(4 * GIB, MODELS["1B"], small).scheduler.num_blocks
    changes = {"max_batch_tokens": 4096, "max_requests_per_batch": 512, "cpu_offload_space": 1.0}
    for field, value in changes.items():
        config = dataclasses.replace(small, **({"max_batch_tokens": 512} | {field: value}))
        assert plan_of(4 * GIB, MODELS["1B"], config).scheduler.num_blocks < most, field


def test_a_layout_that_pads_halves_the_pool_and_says_so():
    plain, padded = (plan_of(8 * GIB, MODELS[name]) for name in ("1B", "padded"))
    assert abs(2 * padded.scheduler.num_blocks - plain.scheduler.num_blocks) <= 4
    assert "2 times their numbers, as the device pads them" in str(padded.memory)
    assert "pads them" not in str(plain.memory)


def test_weights_that_are_not_on_the_device_yet_are_counted():
    here = dataclasses.replace(MODELS["on the host"], unplaced_weight_bytes=0)
    plans = [plan_of(4 * GIB, model).memory for model in (here, MODELS["on the host"])]
    line, other = ({line.name: line for line in plan.lines}["weights"] for plan in plans)
    assert (line.num_bytes, other.num_bytes) == (0, 100 * MIB)
    assert "100.0 MiB are there and not counted as free" in line.why
    assert plans[1].total <= plans[1].budget


def test_steps_in_flight_have_buffers_of_their_own():
    sizes = Sizes(block_size=16, tokens=512, rows=64, columns=32)
    one, two = (
        {line.name: line.num_bytes for line in plan_memory(
            GIB, "", MODELS["1B"], dataclasses.replace(sizes, steps_in_flight=n), 8).lines}
        for n in (0, 1)
    )  # fmt: skip
    assert two.pop("inputs and answers") == 2 * one.pop("inputs and answers")
    assert one == two


@pytest.mark.parametrize(("tokens", "rows"), [(64, 2), (512, 64), (8192, 1024)])
def test_a_descriptor_fits_its_line(tokens, rows):
    sizes = Sizes(block_size=16, tokens=tokens, rows=rows, columns=32)
    planned = {line.name: line.num_bytes for line in plan_memory(GIB, "", MODELS["1B"], sizes, 8).lines}
    packed = packed_shape(Bucket(kind="mixed", tokens=tokens, rows=rows), NUM_WORDS)
    assert packed.size * packed.dtype.itemsize <= planned["inputs and answers"]


def test_the_plan_is_checked_against_what_the_compiler_says():
    plan = plan_of(GIB, MODELS["demo"], ContinuousBatchingConfig(block_size=16)).memory
    assert "estimate: no program is compiled yet" in str(plan)
    assert plan.checked({}) == plan == plan.checked({"decode(2)": 0})
    less = plan.checked({"decode(2)": 5 * MIB, "mixed(64 tokens, 2 rows)": 7 * MIB})
    assert less.measured == (7 * MIB, "mixed(64 tokens, 2 rows)")
    assert less.excess == 0
    assert "7.0 MiB at most, in mixed(64 tokens, 2 rows); -" in str(less)
    more = plan.checked({"decode(2)": plan.estimate + plan.left + 3 * MIB})
    assert more.excess == 3 * MIB
    assert "3.0 MiB above the budget: lower max_batch_tokens" in str(more)
    assert more.total == plan.total


# The real thing, on a backend that reports no memory.

CONFIG = ContinuousBatchingConfig(
    block_size=4, num_blocks=64, max_batch_tokens=16, max_requests_per_batch=4, compilation_cache=False
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


def test_a_cpu_is_asked_through_the_operating_system_and_gives_six_tenths(lm):
    plan = lm.memory_plan()
    assert lm.session is None, "looking at a plan takes no memory"
    assert "the operating system (the device reports none)" in plan.source
    free = float(plan.source.split(" GiB of ")[1].split()[0])
    assert plan.budget / GIB == pytest.approx(0.6 * free, rel=0.01)
    assert plan.total <= plan.budget


def test_the_plan_of_a_session_has_what_is_really_there(lm):
    lm.generate_batch([[1, 2, 3]], GenerationConfig(max_new_tokens=3, eos_token_id=-1), CONFIG)
    plan = lm.memory_plan()
    lines = {line.name: line for line in plan.lines}
    kv = sum(array.nbytes for array in lm.session.device.cache.kv)
    assert lines["KV store"].num_bytes + lines["reserved blocks"].num_bytes == kv
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert f"{weights / MIB:,.1f} MiB are there" in lines["weights"].why
    slots = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.session.device.slots))
    assert slots <= lines["block table"].num_bytes < 2 * slots
    largest = max(lm.session.device.programs.values(), key=lambda program: program.temp_bytes)
    assert plan.measured == (largest.temp_bytes, largest.name)
    assert plan.excess == 0
    assert "temporaries by the compiler" in str(plan)
    assert lm.memory_plan(dataclasses.replace(CONFIG, num_blocks=32)).measured is None
