"""Faults found by trying to break the product; each stays as a test."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.attention import KVSpec
from cbjax.checkpoints import load
from cbjax.compilation_cache import enable_compilation_cache
from cbjax.testing import ByteTokenizer, tiny_llama

GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=-1)
BATCHING = ContinuousBatchingConfig(block_size=4, num_blocks=64, max_batch_tokens=16, max_requests_per_batch=8)
GOLDENS = Path(__file__).parent / "goldens" / "tiny_llama"


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


def test_a_cache_folder_that_cannot_be_made_is_reported_and_stops_nothing(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("CBJAX_CACHE", str(blocker))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert enable_compilation_cache().startswith(f"off: {blocker}")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "set CBJAX_CACHE" in caplog.text


def test_invariant_6_a_prompt_that_raises_anything_fails_alone(lm):
    class Wrecked(list):
        def __getitem__(self, index):
            raise RuntimeError("wrecked")

    class Array:
        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2], dtype)

    alone = tokens(lm.generate_batch([[1, 2]], GREEDY, BATCHING))
    outputs = list(lm.generate_batch([[1, 2], Wrecked([1]), Array()], GREEDY, BATCHING).values())
    assert [output.status for output in outputs] == [
        RequestStatus.FINISHED,
        RequestStatus.FAILED,
        RequestStatus.FINISHED,
    ]
    assert outputs[0].generated_tokens == outputs[2].generated_tokens == alone[0]
    assert "wrecked" in outputs[1].error


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_numpy_integers_are_taken_for_what_they_are(lm, kind):
    generation = GenerationConfig(max_new_tokens=kind(6), eos_token_id=np.array([-1], np.int32))
    batching = ContinuousBatchingConfig(
        block_size=kind(4), num_blocks=kind(64), max_batch_tokens=kind(16), max_requests_per_batch=kind(8)
    )
    assert (batching, generation.max_new_tokens) == (BATCHING, 6)
    assert type(batching.block_size) is type(generation.max_new_tokens) is int
    assert tokens(lm.generate_batch([[1, 2]], generation, batching)) == tokens(
        lm.generate_batch([[1, 2]], GREEDY, BATCHING)
    )


def test_bytes_are_no_eos_ids():
    with pytest.raises(TypeError, match="eos_token_id"):
        GenerationConfig(eos_token_id=b"\x05")


def test_closing_the_model_inside_a_stream_is_refused_and_the_stream_goes_on(lm):
    whole = tokens(lm.generate_batch([[1, 2]], GREEDY, BATCHING))[0]
    stream = lm.stream([1, 2], GREEDY, BATCHING)
    next(stream)
    with pytest.raises(RuntimeError, match="finish or close"):
        lm.close()
    assert list(stream)[-1].generated_tokens == whole


def test_new_params_take_effect_at_the_next_call_not_in_a_running_one(lm):
    old = lm.params
    whole = tokens(lm.generate_batch([[1, 2]], GREEDY, BATCHING))[0]
    stream = lm.stream([1, 2], GREEDY, BATCHING)
    next(stream)
    try:
        lm.params = jax.tree.map(lambda leaf: leaf * 1.5, old)
        assert list(stream)[-1].generated_tokens == whole
        assert tokens(lm.generate_batch([[1, 2]], GREEDY, BATCHING))[0] != whole
    finally:
        lm.params = old


@pytest.mark.parametrize("params", [{"x": 1}, {}, None])
def test_params_of_another_shape_are_refused_by_name(lm, params):
    with pytest.raises(ValueError, match="new params must"):
        lm.params = params


def test_a_stream_that_has_said_its_last_word_holds_nothing(lm):
    stream = lm.stream([1, 2], GREEDY, BATCHING)
    for output in stream:
        if output.is_finished():
            break
    assert len(tokens(lm.generate_batch([[1, 2]], GREEDY, BATCHING))[0]) == 6


def test_an_absurd_block_table_is_cut_to_the_pool(lm):
    wide = ContinuousBatchingConfig(
        block_size=4, num_blocks=64, max_batch_tokens=16, max_requests_per_batch=8, max_blocks_per_request=10**10
    )
    assert len(tokens(lm.generate_batch([[1, 2]], GREEDY, wide))[0]) == 6
    assert lm.session.resolved.scheduler.max_blocks_per_request == 64


def test_a_store_beyond_int32_indices_is_refused():
    with pytest.raises(ValueError, match=r"below 2\*\*31"):
        KVSpec(num_kv_heads=8, head_dim=64, block_size=256, num_blocks=2**20)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("config.json", {"architectures": -1}, "malformed"),
        ("config.json", {"rms_norm_eps": []}, r"'rms_norm_eps' .* must be a number\. Got \[\]"),
        ("config.json", {"eos_token_id": [[1]]}, "malformed"),
        ("config.json", {"num_hidden_layers": 10**7}, "layers"),
        ("generation_config.json", {"eos_token_id": "5"}, "malformed"),
    ],
)
def test_a_value_of_another_type_in_a_checkpoint_is_a_clear_error(tmp_path, name, change, why):
    for path in (GOLDENS / "single").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=why):
        load(tmp_path)


@pytest.mark.parametrize("count", [1, 8, 9])
def test_a_pool_sized_for_the_workload_holds_nobody_back(count):
    """The admission reserve is for pools that can run short; this one holds every request at its longest."""
    lm = tiny_llama()
    config = ContinuousBatchingConfig(block_size=16, max_batch_tokens=64, max_requests_per_batch=16)
    lm.generate_batch([[1 + i] * 5 for i in range(count)], GenerationConfig(max_new_tokens=6, eos_token_id=-1), config)
    assert lm.summary.steps == {"mixed": 1, "decode": 5}
    assert "nobody can lack a block" in lm.session.resolved.report()
    lm.close()
