"""Settings that are misspelt, out of range, of another type, or without effect are refused when they are made."""

import dataclasses

import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.testing import tiny_llama

GREEDY = GenerationConfig(max_new_tokens=5, eos_token_id=-1)
BATCHING = ContinuousBatchingConfig(block_size=4, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=8)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


@pytest.mark.parametrize(
    ("cls", "field", "near"),
    [
        (ContinuousBatchingConfig, "blocksize", "block_size"),
        (ContinuousBatchingConfig, "max_batch_token", "max_batch_tokens"),
        (GenerationConfig, "max_tokens", "max_new_tokens"),
        (GenerationConfig, "temprature", "temperature"),
        (WorkloadHints, "max_prompt_len", "max_prompt_length"),
    ],
)
def test_an_unknown_field_is_refused_and_the_nearest_named(cls, field, near):
    with pytest.raises(TypeError, match=f"{cls.__name__} has no field '{field}'; did you mean '{near}'"):
        cls(**{field: 1})


def test_an_unknown_field_like_none_is_refused_with_the_list():
    with pytest.raises(TypeError, match="its fields are max_new_tokens, do_sample"):
        GenerationConfig(xyz=1)


def test_configs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BATCHING.block_size = 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        GREEDY.max_new_tokens = 8


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("block_size", 3, ValueError),
        ("block_size", -4, ValueError),
        ("block_size", 16.0, TypeError),
        ("block_size", None, TypeError),
        ("block_size", True, TypeError),
        ("num_blocks", 0, ValueError),
        ("num_blocks", "8", TypeError),
        ("max_batch_tokens", 0, ValueError),
        ("max_requests_per_batch", 0, ValueError),
        ("max_blocks_per_request", -1, ValueError),
        ("max_memory_percent", 1.5, ValueError),
        ("max_memory_percent", float("nan"), ValueError),
        ("max_memory_percent", "90%", TypeError),
        ("safety_margin", -0.1, ValueError),
        ("safety_margin", 1.01, ValueError),
        ("safety_margin", False, TypeError),
        ("use_async_batching", 1, TypeError),
        ("async_depth", 0, ValueError),
        ("async_depth", 4, ValueError),
        ("async_depth", 1.0, TypeError),
        ("decode_window", 0, ValueError),
        ("decode_window", 17, ValueError),
        ("decode_window", True, TypeError),
        ("max_window_latency", -0.1, ValueError),
        ("max_window_latency", float("inf"), ValueError),
        ("max_window_latency", None, TypeError),
        ("scheduler_type", "lifo", ValueError),
        ("scheduler_type", None, ValueError),
        ("scheduler_type", ["fifo"], ValueError),
        ("return_logprobs", 1, TypeError),
        ("allow_block_sharing", None, TypeError),
        ("per_request_processors", "yes", TypeError),
        ("compilation_cache", 0, TypeError),
        ("cpu_offload_space", -0.5, ValueError),
        ("cpu_offload_space", float("nan"), ValueError),
        ("cpu_offload_space", float("inf"), ValueError),
        ("cpu_offload_space", None, TypeError),
        ("cpu_offload_space", True, TypeError),
        ("cpu_offload_space", "4", TypeError),
        ("cpu_offload_space_safety_threshold", 0, ValueError),
        ("cpu_offload_space_safety_threshold", -0.1, ValueError),
        ("cpu_offload_space_safety_threshold", 1.01, ValueError),
        ("cpu_offload_space_safety_threshold", float("nan"), ValueError),
        ("cpu_offload_space_safety_threshold", None, TypeError),
        ("cpu_offload_space_safety_threshold", "80%", TypeError),
        ("seed", -1, ValueError),
        ("seed", 1.5, TypeError),
        ("default_compile_level", -1, ValueError),
        ("default_compile_level", 4, ValueError),
        ("default_compile_level", None, TypeError),
        ("default_compile_level", True, TypeError),
        ("decode_buckets", (), ValueError),
        ("decode_buckets", (1, 8), ValueError),
        ("decode_buckets", 8, TypeError),
        ("decode_buckets", "8", TypeError),
        ("decode_buckets", (2, 8.5), TypeError),
        ("mixed_buckets", (64, 64), ValueError),
        ("mixed_buckets", (128, 64), ValueError),
        ("mixed_buckets", (0, 64), ValueError),
        ("mixed_buckets", {64, 128}, TypeError),
    ],
)
def test_a_batching_setting_out_of_range_or_of_another_type_is_refused(field, value, error):
    with pytest.raises(error, match=field):
        ContinuousBatchingConfig(**{field: value})


def test_the_error_of_a_ladder_says_the_rule_the_values_and_the_remedy():
    with pytest.raises(ValueError, match=r"ascending order, each size once; got \(128, 64\): sort them"):
        ContinuousBatchingConfig(mixed_buckets=[128, 64])
    with pytest.raises(ValueError, match=r"not go above max_batch_tokens=64; got \(32, 128\): .* drop 128 or raise"):
        ContinuousBatchingConfig(mixed_buckets=[32, 128], max_batch_tokens=64)
    with pytest.raises(ValueError, match=r"decode_buckets must not go above max_requests_per_batch=8"):
        ContinuousBatchingConfig(decode_buckets=[2, 9], max_requests_per_batch=8)
    with pytest.raises(ValueError, match="max_blocks_per_request=0 for none"):
        ContinuousBatchingConfig(decode_buckets=[2], max_blocks_per_request=0)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("max_new_tokens", 2.0, TypeError),
        ("max_new_tokens", True, TypeError),
        ("do_sample", 1, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", float("inf"), ValueError),
        ("temperature", "hot", TypeError),
        ("top_k", -2, ValueError),
        ("top_k", 1.5, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", float("nan"), ValueError),
        ("top_p", "0.9", TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**64, ValueError),
        ("seed", "1", TypeError),
        ("eos_token_id", "2", TypeError),
        ("eos_token_id", 2.0, TypeError),
        ("eos_token_id", [None], TypeError),
        ("eos_token_id", {2}, TypeError),
        ("eos_token_id", True, TypeError),
    ],
)
def test_b28_a_generation_setting_out_of_range_or_of_another_type_is_refused(field, value, error):
    with pytest.raises(error, match=field):
        GenerationConfig(**{field: value})


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}])
def test_sampling_settings_of_a_greedy_request_are_refused(setting):
    with pytest.raises(ValueError, match="do_sample=False"):
        GenerationConfig(do_sample=False, **setting)


def test_steps_in_flight_and_none_cannot_both_be_asked_for():
    with pytest.raises(ValueError, match="async_depth=2 asks for steps in flight and use_async_batching=False"):
        ContinuousBatchingConfig(async_depth=2, use_async_batching=False)


WITHOUT_EFFECT = {
    "use_cuda_graph": True,
    "max_queue_size": 10,
}


@pytest.mark.parametrize(("field", "value"), WITHOUT_EFFECT.items())
def test_a_field_without_effect_refuses_what_would_ask_for_something(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r} has no effect yet"):
        ContinuousBatchingConfig(**{field: value})


@pytest.mark.parametrize("field", [*WITHOUT_EFFECT, "cpu_offload_space", "cpu_offload_space_safety_threshold"])
def test_invariant_8_a_field_without_effect_is_reported(lm, field):
    lm.generate_batch([[1]], GREEDY, BATCHING)
    (line,) = [line for line in lm.session.resolved.report().splitlines() if line.split()[0] == field]
    assert any(word in line for word in ("without effect", "compiled program", "recomputed", "directly"))


@pytest.mark.parametrize("config", [GenerationConfig(), {"block_size": 4}, 5])
def test_a_batching_config_of_another_type_is_refused(lm, config):
    with pytest.raises(TypeError, match="ContinuousBatchingConfig"):
        lm.generate_batch([[1, 2]], GenerationConfig(), config)
