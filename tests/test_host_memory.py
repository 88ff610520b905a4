"""How many blocks the host tier gets, in which memory, and that the report says so."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.cache import HostTier
from cbjax.machine import HostMemory, MachineFacts, host_memory, machine_facts
from cbjax.resolve import ModelFacts, resolve
from cbjax.scheduler import Offload
from cbjax.testing import tiny_llama

GIB = 1 << 30
PINNED = HostMemory(kind="pinned_host")
GPU = MachineFacts(
    platform="gpu", device="H200", free_bytes=100 * GIB, source="a test", available_ram_bytes=10 * GIB,
    host_memory=PINNED,
)  # fmt: skip
CPU = dataclasses.replace(GPU, platform="cpu", free_bytes=10 * GIB)
# A block of 16 tokens has a MiB.
MODEL = ModelFacts(block_bytes_per_token=1 << 16, token_bytes=4096, row_bytes=4096, max_positions=8192)
MIB_IN_GIB = 1 / 1024


def sized(space, threshold=0.8, machine=GPU, **settings):
    """Blocks of the host tier, and the decisions on the two fields."""
    config = ContinuousBatchingConfig(
        block_size=16, num_blocks=1022, cpu_offload_space=space, cpu_offload_space_safety_threshold=threshold,
        **settings,
    )  # fmt: skip
    resolved = resolve(config, WorkloadHints(), machine, MODEL)
    assert resolved.host_blocks == resolved.scheduler.host_blocks
    decisions = {decision.field: decision for decision in resolved.decisions}
    for name in ("cpu_offload_space", "cpu_offload_space_safety_threshold"):
        assert decisions[name].why in resolved.report()
    return resolved.host_blocks, decisions["cpu_offload_space"], decisions["cpu_offload_space_safety_threshold"]


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["gpu", "cpu"])
def test_by_default_there_is_no_tier(machine):
    blocks, space, threshold = sized(0.0, machine=machine)
    assert (blocks, space.used, threshold.used) == (0, 0.0, 0.8)
    assert space.why == "requests that lose their blocks are recomputed"
    assert threshold.why == "without effect: no host-memory tier"


@pytest.mark.parametrize(
    ("space", "expected"), [(1, 1024), (2.5, 2560), (3.7 * MIB_IN_GIB, 3), (MIB_IN_GIB, 1), (8.0, 8192)]
)
def test_the_space_holds_as_many_whole_blocks_as_it_has_bytes_for(space, expected):
    blocks, decision, threshold = sized(space)
    assert blocks == expected
    assert decision.asked == space
    assert decision.used == pytest.approx(space, abs=5e-4)
    assert decision.why == f"{expected} blocks of 1 MiB in pinned_host memory, copied without waiting"
    assert threshold.why == "of 10.00 GiB available"


@pytest.mark.parametrize("space", [8.001, 100, 1e308])
def test_the_space_is_clamped_to_a_share_of_the_available_memory(space):
    blocks, decision, threshold = sized(space)
    assert (blocks, decision.asked, decision.used, threshold.used) == (8192, space, 8.0, 0.8)
    assert decision.why.endswith("; at most 80% of 10.00 GiB available")
    assert sized(space, threshold=0.25)[0] == 2560
    assert sized(space, threshold=1.0)[0] == int(min(10.0, space) * 1024)


def test_on_a_cpu_the_pool_is_taken_off_first_and_the_report_says_whose_memory_it_is():
    # The pool has 1024 blocks with the reserved ones, so 9 of 10 GiB are left.
    blocks, decision, threshold = sized(9.5, threshold=1.0, machine=CPU)
    assert (blocks, decision.used) == (9 * 1024, 9.0)
    assert "the pool's own memory" in decision.why
    assert threshold.why == "of 9.00 GiB available beside the pool"
    assert decision.why.endswith("; at most 100% of 9.00 GiB available beside the pool")


@pytest.mark.parametrize(
    ("space", "machine"),
    [
        (0.9 * MIB_IN_GIB, GPU),
        (4, dataclasses.replace(GPU, available_ram_bytes=0)),
        (4, dataclasses.replace(CPU, available_ram_bytes=1)),
    ],
)
def test_invariant_8_a_space_that_holds_no_block_is_said_to_be_none(space, machine):
    blocks, decision, _ = sized(space, machine=machine)
    assert (blocks, decision.used) == (0, 0.0)
    assert decision.why.startswith("not given: it holds no block of 1 MiB; requests that lose their blocks are")
    assert ("at most 80%" in decision.why) == (space == 4)


@pytest.mark.parametrize("space", [4, 1e308])
def test_where_nobody_tells_the_available_memory_the_space_is_taken_as_asked(space):
    blocks, decision, threshold = sized(space, machine=dataclasses.replace(GPU, available_ram_bytes=None))
    assert blocks >= 4096
    assert threshold.why == "without effect: the available main memory is not known"
    assert ("at most" in decision.why) == (space == 1e308)


def test_invariant_8_plain_arrays_are_said_with_their_reason():
    machine = dataclasses.replace(GPU, host_memory=HostMemory(why="the device has no host memory (only device)"))
    _, decision, _ = sized(1, machine=machine)
    reason = "NumPy arrays, with a wait for each copy: the device has no host memory (only device)"
    assert decision.why == f"1024 blocks of 1 MiB in {reason}"


# What a device has.


def fake_device(*kinds):
    return SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind=kind) for kind in kinds])


def test_this_machine_has_pinned_memory_and_knows_what_is_free():
    facts = machine_facts()
    assert facts.host_memory == PINNED
    assert facts.available_ram_bytes > 1 << 20


def test_a_device_without_host_memory_leaves_numpy_arrays():
    found = host_memory(fake_device("device"))
    assert found == HostMemory(why="the device has no host memory (only device)")
    assert HostTier(found.kind).memory_kind is None


def test_a_device_that_does_not_name_its_memories_leaves_numpy_arrays():
    def addressable_memories():
        raise NotImplementedError("no memories\nhere")

    found = host_memory(SimpleNamespace(addressable_memories=addressable_memories))
    assert found == HostMemory(why="the device does not name its memories (no memories)")


@pytest.mark.parametrize("works", ["unpinned_host", None])
def test_a_memory_that_is_listed_and_does_not_work_is_passed_over(monkeypatch, works):
    put = jax.device_put

    def device_put(array, place):
        if place.memory_kind != works:
            raise RuntimeError(f"no room in {place.memory_kind}")
        return put(array, place)

    monkeypatch.setattr(jax, "device_put", device_put)
    found = host_memory(jax.devices()[0])
    assert found.kind == works
    if works is None:
        assert found.why == "a copy to unpinned_host memory failed (no room in unpinned_host)"


# The session.


def test_a_session_has_the_tier_that_its_report_tells():
    lm = tiny_llama()
    pool = ContinuousBatchingConfig(
        block_size=4, num_blocks=16, max_batch_tokens=16, max_requests_per_batch=2, compilation_cache=False
    )
    lm.generate_batch([], GenerationConfig(), pool)
    assert lm.session.device.host_tier is None
    assert lm.session.device.programs.keys() == {"table"}
    lm.generate_batch([], GenerationConfig(), dataclasses.replace(pool, cpu_offload_space=0.001))
    device, resolved = lm.session.device, lm.session.resolved
    # K and V, 2 layers, 2 heads of 8, 4 tokens, in float32.
    block_bytes = 2 * 2 * 2 * 8 * 4 * 4
    assert resolved.host_blocks == resolved.scheduler.host_blocks == int(0.001 * GIB) // block_bytes
    device.offload(Offload(uid=0, slot=0, blocks=np.arange(3, dtype=np.int32)))
    assert device.host_tier.num_bytes == 3 * block_bytes
    assert device.host_tier.memory_kind == "pinned_host"
    assert device.programs.keys() == {"table", "gather", "scatter"}
    assert f"{resolved.host_blocks} blocks of 0.000977 MiB in pinned_host memory" in resolved.report()
    lm.close()
