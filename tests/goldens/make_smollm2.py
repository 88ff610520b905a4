"""Makes `smollm2.json`: greedy continuations of SmolLM2-135M-Instruct by transformers' `generate`, on CPU.

    python make_smollm2.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2.json

The weights are the GGUF's, dequantised to float32 by transformers; before anything is generated, every
tensor is compared with gguf's own dequantisation (query and key rows put back into the "rotate half" order)
and every model setting with the GGUF's metadata. Attention is eager, a prompt is alone in its batch, one
thread computes.

Two sections of records, one per line:
- `chat`: `messages` rendered with the GGUF's chat template; at most 64 new tokens, ended by `<|im_end|>`
  (kept in `tokens`), `finish_reason` "stop" or "length"; `text` is `tokens` without special tokens.
- `raw`: text cut to exactly `len(prompt_ids)` tokens; 64 new tokens, EOS ignored (it does occur among them).
`logprobs` are log softmax of the raw logits at the chosen tokens, `margins` best minus second best logit.

Rule: a prompt that has a margin below 2e-4 anywhere is replaced by another one, since equality of float32
tokens has no meaning at a tie; the script stops and names it.

The tokenizer is built here from the GGUF's vocabulary and merges (digits split singly, then byte-level
pieces, as the model's own `tokenizer.json` does) because a converted one may lose the splitting of digits.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from oracle import greedy, require_margin, write_sections
from smollm2_prompts import CHAT_PROMPTS, RAW_PROMPTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.chat_template_utils import render_jinja_template

MAX_NEW_TOKENS = 64
SMALLEST_MARGIN = 2e-4
CONTROL_TOKEN = 3  # the GGUF's token type of ids that never come from text

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

log = logging.getLogger("make_smollm2")


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """All key-value fields of the file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def load_model(path: Path) -> PreTrainedModel:
    """The GGUF as a float32 transformers model with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """SmolLM2's byte-level BPE, from the vocabulary and merges in the GGUF."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} ids, the GGUF {len(tokens)}")
    return tokenizer


def check_config(model: PreTrainedModel, metadata: dict[str, Any]) -> None:
    """Raises ValueError unless the converted config says what the GGUF's metadata says."""
    config = model.config
    converted = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    wrong = {key: value for key, value in converted.items() if metadata[f"llama.{key}"] != value}
    if metadata["tokenizer.ggml.eos_token_id"] != config.eos_token_id:
        wrong["eos_token_id"] = config.eos_token_id
    if config.rope_parameters["rope_type"] != "default" or config.hidden_act != "silu":
        wrong["rope_type, hidden_act"] = (config.rope_parameters["rope_type"], config.hidden_act)
    if wrong:
        raise ValueError(f"converted config differs from the GGUF's metadata: {wrong}")


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from llama.cpp's interleaved pairs to the "rotate half" order.

    weight: float32[num_heads * head_dim, hidden].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def check_weights(model: PreTrainedModel, reader: gguf.GGUFReader) -> None:
    """Raises ValueError unless each parameter equals gguf's own dequantisation bit for bit, head tied."""
    config, state = model.config, model.state_dict()
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER_TENSORS.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    if {tensor.name for tensor in reader.tensors} != set(names):
        raise ValueError("the GGUF's tensors are not those of a llama with a tied head and no biases")
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            expected = unpermute(expected, config.num_attention_heads)
        elif ".attn_k." in tensor.name:
            expected = unpermute(expected, config.num_key_value_heads)
        if not np.array_equal(expected, state[names[tensor.name]].numpy()):
            raise ValueError(f"{tensor.name} was not converted to {names[tensor.name]} faithfully")
    if not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
        raise ValueError("the output head is not tied to the embedding")


def chat_records(model: PreTrainedModel, tokenizer: Tokenizer, template: str) -> list[dict]:
    """One record per chat prompt."""
    records = []
    eos = model.config.eos_token_id
    for name, messages in CHAT_PROMPTS.items():
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True
        )
        prompt_ids = tokenizer.encode(rendered[0], add_special_tokens=False).ids
        output = greedy(model, prompt_ids, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=eos)
        require_margin(name, output, SMALLEST_MARGIN)
        text = tokenizer.decode(output["tokens"], skip_special_tokens=True)
        reason = "stop" if output["tokens"][-1] == eos else "length"
        log.info("%s: %d + %d tokens, %s\n%s", name, len(prompt_ids), len(output["tokens"]), reason, text)
        prompt = {"name": name, "messages": messages, "prompt_ids": prompt_ids}
        records.append(prompt | {"finish_reason": reason, "text": text} | output)
    return records


def raw_records(model: PreTrainedModel, tokenizer: Tokenizer) -> list[dict]:
    """One record per raw prompt, cut to its exact length in tokens."""
    records = []
    for length, text in RAW_PROMPTS.items():
        prompt_ids = tokenizer.encode(text, add_special_tokens=False).ids[:length]
        if len(prompt_ids) != length:
            raise ValueError(f"raw prompt of {length} tokens: its text has only {len(prompt_ids)}")
        output = greedy(model, prompt_ids, max_new_tokens=MAX_NEW_TOKENS)
        require_margin(f"raw {length}", output, SMALLEST_MARGIN)
        log.info("raw %d: %r", length, tokenizer.decode(output["tokens"], skip_special_tokens=False))
        records.append({"prompt_ids": prompt_ids} | output)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="Make smollm2.json with transformers.")
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)

    reader = gguf.GGUFReader(args.gguf)
    metadata = read_metadata(reader)
    model = load_model(args.gguf)
    check_config(model, metadata)
    check_weights(model, reader)
    tokenizer = build_tokenizer(metadata)
    chat = chat_records(model, tokenizer, metadata["tokenizer.chat_template"])
    raw = raw_records(model, tokenizer)

    log.info("smallest margin: %.4f", min(min(record["margins"]) for record in chat + raw))
    header = {
        "gguf": args.gguf.name,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": model.config.eos_token_id,
    }
    write_sections(args.out, header, {"chat": chat, "raw": raw})


if __name__ == "__main__":
    main()
