"""Configuration: the fields of the table that users know, their defaults, and what is derived from them."""

import dataclasses
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints

# Names and defaults of transformers' ContinuousBatchingConfig.
BATCHING_DEFAULTS = {
    "block_size": 256,
    "num_blocks": None,
    "max_batch_tokens": None,
    "max_memory_percent": None,
    "max_requests_per_batch": None,
    "max_blocks_per_request": None,
    "allow_block_sharing": True,
    "use_async_batching": None,
    "use_cuda_graph": None,
    "default_compile_level": 0,
    "scheduler_type": "fifo",
    "safety_margin": None,
    "cpu_offload_space": 0.0,
    "cpu_offload_space_safety_threshold": 0.8,
    "return_logprobs": False,
    "per_request_processors": False,
    "max_queue_size": 0,
}
OWN_DEFAULTS = {
    "attn_implementation": None,
    "batch_invariant": False,
    "async_depth": None,
    "decode_window": None,
    "max_window_latency": 0.05,
    "eviction_policy": "arc",
    "seed": None,
    "compilation_cache": True,
    "decode_buckets": None,
    "mixed_buckets": None,
}
GENERATION_DEFAULTS = {
    "max_new_tokens": 20,
    "do_sample": None,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "seed": None,
    "num_return_sequences": 1,
    "eos_token_id": None,
}


def fields_of(config):
    """Field by field, with the type, since 0 == 0.0 == False."""
    return {f.name: (type(value := getattr(config, f.name)), value) for f in dataclasses.fields(config)}


def typed(values):
    return {name: (type(value), value) for name, value in values.items()}


def test_every_field_of_the_table_exists_with_its_default():
    assert fields_of(ContinuousBatchingConfig()) == typed(BATCHING_DEFAULTS | OWN_DEFAULTS)


def test_generation_defaults():
    assert fields_of(GenerationConfig()) == typed(GENERATION_DEFAULTS)


def test_hints_say_nothing_by_default():
    expected = {"max_prompt_length": 0, "max_generated_length": 0, "num_requests": 0}
    assert fields_of(WorkloadHints()) == typed(expected)


@pytest.mark.parametrize("cls", [ContinuousBatchingConfig, GenerationConfig, WorkloadHints])
def test_configs_are_values(cls):
    config = cls()
    assert config == cls()
    assert hash(config) == hash(cls())
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config
    assert repr(config).startswith(f"{cls.__name__}(")
    with pytest.raises(TypeError):
        cls(1)


@pytest.mark.parametrize("cls", [ContinuousBatchingConfig, GenerationConfig])
def test_the_docstring_names_every_field(cls):
    assert [f.name for f in dataclasses.fields(cls) if f.name not in inspect.getdoc(cls)] == []


@pytest.mark.parametrize("cls", [ContinuousBatchingConfig, GenerationConfig, WorkloadHints])
def test_the_signature_is_that_of_the_fields(cls):
    """So that editors complete them and help() shows them, although unknown names are caught."""
    assert list(inspect.signature(cls).parameters) == [f.name for f in dataclasses.fields(cls)]


def test_numpy_integers_are_integers():
    config = ContinuousBatchingConfig(block_size=np.int64(16), num_blocks=np.int32(8), seed=np.uint8(3))
    assert config == ContinuousBatchingConfig(block_size=16, num_blocks=8, seed=3)
    generation = GenerationConfig(max_new_tokens=np.int64(5), top_k=np.int32(4), eos_token_id=[np.int64(2)])
    assert generation.sampling(seed=0, logprobs=False).top_k == 4
    assert generation.eos_token_ids(()) == (2,)


@pytest.mark.parametrize(("scheduler_type", "margin"), [("fifo", 0.0), ("fifo", 1), ("prefill_first", 0.15)])
def test_values_at_the_ends_of_their_ranges_are_accepted(scheduler_type, margin):
    ends = {
        "block_size": 4,
        "num_blocks": 1,
        "max_batch_tokens": 1,
        "max_requests_per_batch": 1,
        "max_blocks_per_request": 0,
        "scheduler_type": scheduler_type,
        "safety_margin": margin,
        "max_memory_percent": 1.0,
        "cpu_offload_space": 0,
        "cpu_offload_space_safety_threshold": 1,
    }
    config = ContinuousBatchingConfig(**ends)
    assert {name: getattr(config, name) for name in ends} == ends


@pytest.mark.parametrize(
    "off",
    [
        {"use_cuda_graph": False},
        {"default_compile_level": 0},
        {"per_request_processors": True},
        {"per_request_processors": False},
        {"allow_block_sharing": False},
        {"max_queue_size": 0},
    ],
)
def test_off_is_accepted_where_a_field_has_no_effect(off):
    config = ContinuousBatchingConfig(**off)
    assert {name: getattr(config, name) for name in off} == off


# What a generation config means.


@pytest.mark.parametrize(
    ("settings", "sampled"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "do_sample": True}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"top_p": 1}, False),
        ({"do_sample": True}, True),
        ({"do_sample": False}, False),
        ({"do_sample": False, "temperature": 0.0, "top_k": 0, "top_p": 1.0}, False),
        ({"seed": 3}, False),
    ],
)
def test_what_makes_a_request_sampled(settings, sampled):
    params = GenerationConfig(**settings).sampling(seed=1, logprobs=False)
    assert (not params.greedy) == sampled


def test_the_seed_of_the_request_goes_before_the_derived_one():
    assert GenerationConfig(do_sample=True).sampling(seed=8, logprobs=False).seed == 8
    assert GenerationConfig(do_sample=True, seed=3).sampling(seed=8, logprobs=False).seed == 3
    assert GenerationConfig(do_sample=True, seed=0).sampling(seed=8, logprobs=False).seed == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (1, 7)), (2, (2,)), ([5, 2, 5], (2, 5)), ((3,), (3,)), (-1, ()), ([], ()), ([-1, 4], (4,)), (0, (0,))],
)
def test_eos_ids(given, expected):
    assert GenerationConfig(eos_token_id=given).eos_token_ids((1, 7)) == expected


def test_making_configs_imports_no_jax():
    code = (
        "import sys, cbjax; cbjax.ContinuousBatchingConfig(); cbjax.GenerationConfig(); cbjax.WorkloadHints();"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
