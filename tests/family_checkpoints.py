"""Tiny checkpoints of every family, as Hugging Face folders with weights from a seed.

`goldens/make_family_goldens.py` gives the folders to transformers, the tests give the same ones to cbjax: this module
needs NumPy and safetensors only. `RandomState` promises the same numbers in every version of NumPy.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE = 96
WINDOW = 8
# Before, at and past the window's edge (case B09), and twice the window.
PROMPT_LENGTHS = (1, 7, 8, 9, 12, 16, 25, 40)
MAX_NEW_TOKENS = 24
# The prompt whose last logits are in the goldens, and how many positions.
LOGITS_PROMPT, LOGITS_POSITIONS = 6, 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

# Name -> (seed of weights and prompts, config.json beyond `_COMMON`).
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (
        91,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "tie_word_embeddings": True,
            # With 32 original positions there are pairs in all three bands.
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": (
        42,
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW, "head_dim": 12},
    ),
    # The first layer sees everything, the others slide.
    "qwen2": (
        73,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": 3,
            "rope_theta": 1_000_000.0,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        224,
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "rope_theta": 1_000_000.0},
    ),
    "granite": (
        115,
        {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.1,
            "logits_scaling": 1.5,
        },
    ),
    # The middle layer neither rotates nor sees beyond its window.
    "smollm3": (
        26,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "rope_theta": 2_000_000.0,
        },
    ),
    # The first layer slides. Scores and logits reach their caps.
    "gemma2": (
        25,
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "head_dim": 12,
            "query_pre_attn_scalar": 20_000,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 12.0,
        },
    ),
    # The last layer sees everything and rotates with another base, stretched.
    "gemma3": (
        6,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "head_dim": 12,
            "query_pre_attn_scalar": 3600,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    # The first layer slides. Gates reach their limit, and YaRN blends in the middle pairs.
    "gpt_oss": (
        7,
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.0,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def config_of(family: str) -> dict[str, Any]:
    """The whole config.json."""
    return _COMMON | FAMILIES[family][1]


def tensors_of(family: str) -> dict[str, np.ndarray]:
    """Float32 tensors under their Hugging Face names; norms lie around 1.

    Gemma's lie around 4, to which the model adds 1, and its embeddings are small: they are multiplied, and with a
    larger share of the residual stream each token would only repeat itself.
    """
    random = np.random.RandomState(FAMILIES[family][0])
    norm, embedding = (4.0, 0.15) if family.startswith("gemma") else (1.0, 0.4)
    tensors = {}
    for name, shape in _shapes(family, config_of(family)).items():
        noise = random.standard_normal(shape)
        scaled = norm + 0.2 * noise if "norm" in name else (embedding if "embed" in name else 0.4) * noise
        tensors[name] = scaled.astype(np.float32)
    return tensors


def prompts_of(family: str) -> list[list[int]]:
    """One prompt of random ids for each of `PROMPT_LENGTHS`."""
    random = np.random.RandomState(1000 + FAMILIES[family][0])
    return [random.randint(VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENGTHS]


def write(family: str, folder: Path, config: dict[str, Any] | None = None, without: str = "") -> Path:
    """The family's folder, with changes to its config.json and without one of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(family) | (config or {})), encoding="utf-8")
    tensors = {name: values for name, values in tensors_of(family).items() if name != without}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    width, kv_width = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for layer in (f"model.layers.{i}" for i in range(config["num_hidden_layers"])):
        attention = f"{layer}.self_attn"
        shapes |= {f"{layer}.{norm}_layernorm.weight": (hidden,) for norm in _norms(family)}
        shapes |= {f"{attention}.q_proj.weight": (width, hidden), f"{attention}.o_proj.weight": (hidden, width)}
        shapes |= {f"{attention}.{name}_proj.weight": (kv_width, hidden) for name in "kv"}
        if family in ("qwen2", "gpt_oss"):
            shapes |= {f"{attention}.{name}_proj.bias": (width if name == "q" else kv_width,) for name in "qkv"}
        if family in ("qwen3", "gemma3"):
            shapes |= {f"{attention}.{name}_norm.weight": (head_dim,) for name in "qk"}
        if family == "gpt_oss":
            shapes |= {f"{attention}.o_proj.bias": (hidden,), f"{attention}.sinks": (config["num_attention_heads"],)}
            shapes |= _experts(f"{layer}.mlp", config)
        else:
            shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, inner)}
    shapes |= {"model.norm.weight": (hidden,)}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (VOCAB_SIZE, hidden)}


def _norms(family: str) -> tuple[str, ...]:
    plain = ("input", "post_attention")
    return (*plain, "pre_feedforward", "post_feedforward") if family.startswith("gemma") else plain


def _experts(mlp: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    count, hidden, inner = config["num_local_experts"], config["hidden_size"], config["intermediate_size"]
    return {
        f"{mlp}.router.weight": (count, hidden),
        f"{mlp}.router.bias": (count,),
        f"{mlp}.experts.gate_up_proj": (count, hidden, 2 * inner),
        f"{mlp}.experts.gate_up_proj_bias": (count, 2 * inner),
        f"{mlp}.experts.down_proj": (count, inner, hidden),
        f"{mlp}.experts.down_proj_bias": (count, hidden),
    }
