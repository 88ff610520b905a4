"""Families as table entries: what of a config.json or a GGUF file reaches the decoder, and what is refused."""

from pathlib import Path
from typing import Any

import family_checkpoints as checkpoints
import gguf
import jax
import numpy as np
import pytest

from cbjax.checkpoints import Checkpoint, load
from cbjax.models import DecoderConfig
from cbjax.models.families import FAMILIES, family_of_hf, form_of_gguf


def read(family: str, **changes: Any) -> DecoderConfig:
    config = checkpoints.config_of(family) | changes
    return family_of_hf(config).from_hf(config)


def read_published(architecture: str, **settings: Any) -> DecoderConfig:
    """A config.json with what every family needs and `settings`: all else has the family's defaults."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6}
    config = {"architectures": [architecture], "num_attention_heads": 32} | sizes | settings
    return family_of_hf(config).from_hf(config)


def test_every_family_has_a_golden_checkpoint():
    tested = {checkpoints.config_of(name)["architectures"][0] for name in checkpoints.FAMILIES}
    assert tested == {family.hf_architecture for family in FAMILIES}
    for name in checkpoints.FAMILIES:
        config = checkpoints.config_of(name)
        assert family_of_hf(config) == family_of_hf(config | {"architectures": None})


@pytest.mark.parametrize(
    ("given", "windows"), [({"sliding_window": None}, None), ({"sliding_window": 5}, (5,) * 6), ({}, (4096,) * 6)]
)
def test_mistral_slides_everywhere_or_nowhere(given, windows):
    config = read_published("MistralForCausalLM", **given)
    assert (config.windows, config.num_kv_heads, config.max_positions) == (windows, 8, 131_072)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, None),
        ({"sliding_window": 7, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 7}, None),  # 28 layers before the first that slides
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "max_window_layers": 4}, (None,) * 4 + (4096,) * 2),
        (
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL] * 3},
            (7, None, 7, None, 7, None),
        ),
        ({"use_sliding_window": False, "sliding_window": 7, "layer_types": [SLIDING, FULL] * 3}, None),
    ],
)
def test_qwen_slides_where_it_is_told_to(family, given, windows):
    assert read_published(family, **given).windows == windows


def test_qwen_biases_norms_and_heads():
    two = read_published("Qwen2ForCausalLM")
    assert (two.qkv_bias, two.out_bias, two.mlp_bias, two.qk_norm, two.head_dim) == (True, False, False, False, 2)
    three = read_published("Qwen3ForCausalLM")
    assert (three.qkv_bias, three.out_bias, three.qk_norm, three.head_dim) == (False, False, True, 128)
    biased = read_published("Qwen3ForCausalLM", attention_bias=True, head_dim=16)
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias, biased.head_dim) == (True, True, False, 16)


def test_granite_multipliers():
    config = read("granite")
    assert (config.embedding_multiplier, config.residual_multiplier) == (3.0, 0.6)
    assert (config.attention_scale, config.logits_divisor) == (0.1, 1.5)
    plain = read_published("GraniteForCausalLM")
    # As in transformers, scores that no multiplier is given for are not scaled at all.
    assert (plain.attention_scale, plain.embedding_multiplier, plain.logits_divisor) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "rope_layers", "windows"),
    [
        ({}, (True, True, True, False, True, True), None),
        ({"no_rope_layer_interval": 3}, (True, True, False) * 2, None),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 0, 0, 0]}, (False, True, True, True, True, False), None),
        ({"use_sliding_window": True, "sliding_window": 7}, (True, True, True, False, True, True), "where not rotated"),
        (
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING] * 2 + [FULL] * 4},
            (True, True, True, False, True, True),
            (7, 7, None, None, None, None),
        ),
    ],
)
def test_smollm3_layers(given, rope_layers, windows):
    config = read_published("SmolLM3ForCausalLM", **given)
    if windows == "where not rotated":
        windows = (None, None, None, 7, None, None)
    assert (config.rope_layers, config.windows) == (rope_layers, windows)
    assert (config.rope.theta, config.tie_embeddings, config.num_kv_heads) == (2e6, True, 4)


# Two have experts, YaRN or a rope for each kind of layer: see test_hybrid_family_configs.py.
PLAIN = [name for name in checkpoints.FAMILIES if name not in ("gemma3", "gpt_oss")]


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "Unsupported hidden_act: 'gelu'. Supported: silu"),
        ({"partial_rotary_factor": 0.5}, "Unsupported partial_rotary_factor: 0.5. Supported: 1.0"),
        (
            {"rope_scaling": {"type": "yarn"}},
            "Unsupported rope scaling type: 'yarn'. Supported: default, linear, llama3",
        ),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "Supported: one rope for all layers"),
        ({"num_local_experts": 8}, "Unsupported num_local_experts: 8. Supported: none: dense models"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Unsupported quantization_config: 'gptq'"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' .* must be a number. Got '1e-5'"),
    ],
)
def test_settings_that_every_family_refuses(family, changes, message):
    with pytest.raises(ValueError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "qwen2",
            {"layer_types": [FULL, "linear_attention", FULL]},
            "'linear_attention'. Supported: full_attention, sl",
        ),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, "'layer_types' .* a value for each of 3 layers"),
        ("qwen3", {"max_window_layers": "all"}, "'max_window_layers' .* must be an integer. Got 'all'"),
        ("mistral", {"sliding_window": -4}, "windows must hold positive integers or None"),
        ("smollm3", {"no_rope_layers": [1]}, "'no_rope_layers' .* a value for each of 3 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "'no_rope_layer_interval' .* must be positive. Got 0"),
        ("granite", {"attention_multiplier": "0.1"}, "'attention_multiplier' .* must be a number"),
        ("granite", {"logits_scaling": 0.0}, "logits_divisor must not be 0"),
        (
            "llama",
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "Supported: LlamaForCausalLM, Mistral.*, SmolLM3ForCausalLM",
        ),
    ],
)
def test_settings_that_a_family_refuses(family, changes, message):
    with pytest.raises(ValueError, match=message):
        read(family, **changes)


# What llama.cpp's converter does: LlamaModel and those derived from it reorder the rows of queries and keys.
GGUF_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
GRANITE_SCALES = {"embedding_scale": 3.0, "residual_scale": 0.6, "attention.scale": 0.1, "logit_scale": 1.5}
GGUF_KEYS: dict[str, dict[str, float]] = {"granite": GRANITE_SCALES, "mistral": {"attention.sliding_window": 8}}


def gguf_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_TENSORS[module]}.{part}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{GGUF_TENSORS[inner]}.{part}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row j of each half of a head goes to place 2j or 2j + 1, written one row at a time."""
    out, head_dim = np.empty_like(rows), len(rows) // num_heads
    for row in range(len(rows)):
        head, (half, j) = row // head_dim, divmod(row % head_dim, head_dim // 2)
        out[head * head_dim + 2 * j + half] = rows[row]
    return out


def write_gguf(path: Path, family: str, keys: dict[str, Any], extra: dict[str, np.ndarray] | None = None) -> Path:
    config = checkpoints.config_of(family)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = {"mistral": "llama"}.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, values in checkpoints.tensors_of(family).items():
        permuted = not family.startswith("qwen") and ("q_proj" in name or "k_proj" in name)
        rows = permute(values, heads if "q_proj" in name else kv_heads) if permuted else values
        writer.add_tensor(gguf_name(name), rows)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def both(family: str, tmp_path: Path, **changes: Any) -> tuple[Checkpoint, Checkpoint]:
    """The family's checkpoint from its GGUF file and from its folder with changes to config.json."""
    stored = load(write_gguf(tmp_path / "m.gguf", family, GGUF_KEYS.get(family, {})))
    return stored, load(checkpoints.write(family, tmp_path / "hf", changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": None}),
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("granite", {}),
        ("smollm3", {"use_sliding_window": False, "no_rope_layer_interval": 4}),
    ],
)
def test_gguf_and_folder_give_the_same_model(family, changes, tmp_path):
    stored, expected = both(family, tmp_path, **changes)
    fields = DecoderConfig.__dataclass_fields__
    for name in fields:
        got, wanted = getattr(stored.config, name), getattr(expected.config, name)
        # Floats are float32 in the file.
        assert got == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), name
    jax.tree.map(np.testing.assert_array_equal, stored.params, expected.params)


def test_gguf_smollm3_leaves_every_fourth_layer_unrotated():
    metadata = {"general.architecture": "smollm3", "smollm3.block_count": 9}
    sizes = {"embedding_length": 32, "feed_forward_length": 48, "context_length": 64, "vocab_size": 96}
    metadata |= {f"smollm3.{key}": value for key, value in sizes.items()}
    metadata |= {"smollm3.attention.head_count": 4, "smollm3.attention.layer_norm_rms_epsilon": 1e-5}
    config = form_of_gguf(metadata).read(metadata, {}, None)
    assert config.rope_layers == (True, True, True, False, True, True, True, False, True)


def test_gguf_granite_without_multipliers_is_a_llama(tmp_path):
    config = load(write_gguf(tmp_path / "m.gguf", "granite", {})).config
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_divisor) == (1.0, 1.0, 1.0)
    assert config.attention_scale is None


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3", {"expert_count": 8}, "Unsupported qwen3.expert_count: 8. Supported: 0"),
        ("qwen2", {"attention.sliding_window": 8}, "Unsupported qwen2.attention.sliding_window: 8. Supported: none"),
        ("granite", {"rope.scaling.finetuned": False}, "Unsupported granite.rope.scaling.finetuned: False"),
        ("qwen2", {"rope.scaling.type": "yarn"}, "Unsupported rope.scaling.type: 'yarn'"),
    ],
)
def test_gguf_settings_that_are_refused(family, keys, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(write_gguf(tmp_path / "m.gguf", family, keys))


def test_gguf_tensors_of_another_family_are_not_known(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=r"1 not known: blk\.0\.attn_q_norm\.weight"):
        load(write_gguf(tmp_path / "m.gguf", "llama", {}, extra))
