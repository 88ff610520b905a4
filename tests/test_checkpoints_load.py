"""`load`: folders and GGUF files to configuration, parameters and EOS ids, and everything that it refuses."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import HF_CONFIG, hf_tensors, write_folder, write_gguf

from cbjax.checkpoints import Checkpoint, GenerationDefaults, load
from cbjax.models import DecoderConfig, LinearScaling, Llama3Scaling, RopeConfig, abstract_params, flatten

EXPECTED_CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    max_positions=64,
)


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    """Every parameter is the tensor of the Hugging Face name that its path stands for."""
    params = flatten(checkpoint.params)
    wanted = flatten(abstract_params(checkpoint.config, next(iter(params.values())).dtype))
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in params.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in wanted.items()
    }
    for path, leaf in params.items():
        assert isinstance(leaf, jax.Array)
        expected = tensors[hf_name(path)].astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), expected, err_msg=str(path))


def hf_name(path: tuple[str | int, ...]) -> str:
    match path:
        case ("embed", "weight"):
            return "model.embed_tokens.weight"
        case ("norm", "weight"):
            return "model.norm.weight"
        case ("head", "weight"):
            return "lm_head.weight"
        case ("layers", i, "attn_norm", "weight"):
            return f"model.layers.{i}.input_layernorm.weight"
        case ("layers", i, "mlp_norm", "weight"):
            return f"model.layers.{i}.post_attention_layernorm.weight"
        case ("layers", i, "attn", name, part):
            return f"model.layers.{i}.self_attn.{name}_proj.{part}"
        case ("layers", i, "mlp", name, part):
            return f"model.layers.{i}.mlp.{name}_proj.{part}"
        case _:
            raise AssertionError(path)


@pytest.mark.parametrize("num_shards", [None, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folder(tmp_path: Path, num_shards: int | None, dtype: str) -> None:
    tensors = hf_tensors()
    checkpoint = load(write_folder(tmp_path, tensors, num_shards=num_shards), dtype=dtype)
    assert checkpoint.config == EXPECTED_CONFIG
    assert checkpoint.params["norm"]["weight"].dtype == jnp.dtype(dtype)
    assert checkpoint.tokenizer is None
    assert checkpoint.source == str(tmp_path)
    assert_holds(checkpoint, tensors)


def test_parameters_outlive_the_file(tmp_path: Path) -> None:
    tensors = hf_tensors()
    checkpoint = load(write_folder(tmp_path, tensors))
    size = (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    assert_holds(checkpoint, tensors)


def test_gguf_and_folder_give_the_same_model(tmp_path: Path) -> None:
    tensors = hf_tensors()
    checkpoint = load(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)  # float32 in the file
    assert checkpoint.config.rope == EXPECTED_CONFIG.rope
    assert not checkpoint.config.tie_embeddings
    assert_holds(checkpoint, tensors)


def test_quantised_gguf_is_dequantised_in_the_right_rows(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = hf_tensors()
    rounded = {
        name: values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        for name, values in tensors.items()
    }
    assert_holds(load(write_gguf(tmp_path / "m.gguf", tensors, kind=kind)), rounded)


def test_tied_models_have_no_head(tmp_path: Path) -> None:
    tensors = hf_tensors(tied=True)
    folder = write_folder(tmp_path / "hf", tensors, config={"tie_word_embeddings": True})
    for checkpoint in (load(folder), load(write_gguf(tmp_path / "m.gguf", tensors))):
        assert checkpoint.config.tie_embeddings
        assert "head" not in checkpoint.params
        assert_holds(checkpoint, tensors)


def test_tensors_that_checkpoints_carry_for_nothing(tmp_path: Path) -> None:
    tensors = hf_tensors()
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    checkpoint = load(write_folder(tmp_path, tensors | extra, config={"tie_word_embeddings": True}))
    assert checkpoint.config.tie_embeddings
    assert "head" not in checkpoint.params


@pytest.mark.parametrize("part", ["attention_bias", "mlp_bias"])
def test_biases(tmp_path: Path, part: str) -> None:
    rng = np.random.default_rng(1)
    modules = {"attention_bias": ("q", "k", "v", "o"), "mlp_bias": ("gate", "up", "down")}[part]
    tensors = hf_tensors()
    for name, values in list(tensors.items()):
        if any(f".{module}_proj." in name for module in modules):
            bias = rng.standard_normal(values.shape[0]).astype(np.float32)
            tensors[name.replace(".weight", ".bias")] = bias
    folder = write_folder(tmp_path / "hf", tensors, config={part: True})
    for checkpoint in (load(folder), load(write_gguf(tmp_path / "m.gguf", tensors))):
        config = checkpoint.config
        assert (config.qkv_bias, config.out_bias) == (part == "attention_bias",) * 2
        assert config.mlp_bias == (part == "mlp_bias")
        assert_holds(checkpoint, tensors)


def test_all_wrong_tensors_are_named_at_once(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 32), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((64, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="do not fit its configuration") as error:
        load(write_folder(tmp_path, tensors))
    message = str(error.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "2 not known: model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight" in message
    assert "1 of the wrong shape: model.layers.0.self_attn.k_proj.weight [32, 32] instead of [16, 32]" in message


def test_a_gguf_with_a_missing_tensor(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(ValueError, match=r"1 missing: blk.1.attn_q.weight"):
        load(write_gguf(tmp_path / "m.gguf", tensors))


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 missing: lm_head.weight"):
        load(write_folder(tmp_path, hf_tensors(tied=True)))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = hf_tensors()
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ValueError, match=r"'model.norm.weight' has dtype int8, weights must be floating point"):
        load(write_folder(tmp_path, tensors))


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": None}, RopeConfig(theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(theta=1e5, scaling=LinearScaling(factor=2.0)),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e5, "rope_type": "linear", "factor": 2}},
            RopeConfig(theta=1e5, scaling=LinearScaling(factor=2.0)),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, scaling=LLAMA3_SCALING),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, scaling=LLAMA3_SCALING),
        ),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, config: dict[str, Any], rope: RopeConfig) -> None:
    assert load(write_folder(tmp_path, hf_tensors(), config=config)).config.rope == rope


def test_head_dim_that_is_not_a_quotient(tmp_path: Path) -> None:
    tensors = {
        name: np.concatenate([values] * 2, axis=1 if "o_proj" in name else 0) if "self_attn" in name else values
        for name, values in hf_tensors().items()
    }
    checkpoint = load(write_folder(tmp_path, tensors, config={"head_dim": 16}))
    assert checkpoint.config.head_dim == 16
    assert_holds(checkpoint, tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"Unsupported architecture: \['GPT2LMHeadModel'\]. Supported: LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "gemma"}, "Unsupported architecture: 'gemma'"),
        ({"hidden_act": "gelu"}, "Unsupported hidden_act: 'gelu'. Supported: silu"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "Unsupported rope scaling type: 'yarn'. Supported: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "must have 'factor'"),
        ({"partial_rotary_factor": 0.5}, "Unsupported partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Unsupported quantization_config: 'gptq'"),
        ({"hidden_size": None}, "must have 'hidden_size'"),
        ({"num_attention_heads": 0}, "num_heads must be positive"),
        ({"num_attention_heads": "4"}, "'num_attention_heads' .* must be an integer. Got '4'"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write_folder(tmp_path, hf_tensors(), config=config))


def test_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    assert load(write_folder(tmp_path, hf_tensors(), config={"architectures": None})).config == EXPECTED_CONFIG


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"architecture": "gpt2"}, "Unsupported GGUF general.architecture: 'gpt2'. Supported: llama"),
        ({"metadata": {"llama.expert_count": 8}}, "Unsupported llama.expert_count: 8"),
        ({"metadata": {"split.count": 3}}, r"m.gguf is one of 3 parts; join them .*llama-gguf-split --merge"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "Unsupported rope.scaling.type: 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "Unsupported rope.dimension_count: 4"),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, "Unsupported tokenizer.ggml.model: 'rwkv'"),
        ({"extra": {"rope_freqs.weight": np.array([1, 1, 2, 3], np.float32)}}, "Unsupported divisors"),
    ],
)
def test_gguf_files_that_are_refused(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write_gguf(tmp_path / "m.gguf", hf_tensors(), **kwargs))


def test_gguf_linear_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    checkpoint = load(write_gguf(tmp_path / "m.gguf", hf_tensors(), metadata=metadata))
    assert checkpoint.config.rope.scaling == LinearScaling(factor=4.0)


def test_gguf_llama3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    theta = 405_000.0
    wavelengths = 2 * np.pi * theta ** (np.arange(4) / 4)  # 6, 158, 3999 and 100,873 tokens
    smooth = (8192 / wavelengths[2] - 1) / (4 - 1)  # the third lies between 8192 / 4 and 8192
    divisors = np.array([1, 1, 1 / ((1 - smooth) / 32 + smooth), 32], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        hf_tensors(),
        metadata={"llama.rope.freq_base": theta},
        extra={"rope_freqs.weight": divisors},
    )
    assert load(path).config.rope == RopeConfig(theta=theta, scaling=LLAMA3_SCALING)


@pytest.mark.parametrize(
    ("model", "generation", "expected"),
    [
        (3, None, (3,)),
        (None, None, ()),
        (-1, None, ()),
        (3, {"eos_token_id": [7, 5]}, (3, 5, 7)),
        (3, {"eos_token_id": -1}, (3,)),
        ([3, -1], {"eos_token_id": 3}, (3,)),
    ],
)
def test_eos_ids_are_the_union(
    tmp_path: Path, model: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path, hf_tensors(), config={"eos_token_id": model}, generation=generation)
    assert load(folder).eos_token_ids == expected


def test_generation_defaults(tmp_path: Path) -> None:
    assert load(write_folder(tmp_path / "a", hf_tensors())).generation == GenerationDefaults()
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 9, "pad_token_id": 0}
    checkpoint = load(write_folder(tmp_path / "b", hf_tensors(), generation=generation))
    assert checkpoint.generation == GenerationDefaults(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=9)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder, nor 'demo', nor the 'org/name'"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        load("missing.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        load(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"dtype must be one of float32, bfloat16. Got 'float16'"):
        load(tmp_path, dtype="float16")


def test_json_that_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_tensors())
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG)[:-20])
    with pytest.raises(ValueError, match=r"config.json is not JSON .*download it again"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object. Got list"):
        load(tmp_path)
