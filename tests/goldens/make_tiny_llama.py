"""Makes `tiny_llama/`: tiny random Llamas saved by transformers, and their greedy continuations.

    python make_tiny_llama.py --out tiny_llama

- `single/`: plain Llama with a tied head, one safetensors file. Its `config.json` has EOS id 2 and its
  `generation_config.json` EOS ids 1 and 5, so a reader that unites them gets 1, 2 and 5.
- `sharded/`: the same weights in several safetensors files with an index; no `generation_config.json`.
- `llama3/`: untied head, Llama-3 rope scaling that matters at short lengths, biases everywhere, a head_dim
  that is not hidden_size / num_heads, no EOS ids at all.
- `goldens.json`: for each of the two models eight prompts of random ids with 24 greedy tokens each (EOS
  ignored), their logprobs and the margins between the best two logits.

Everything follows from the seeds below. They were chosen so that no margin is below 0.01: float32 equality
has no meaning at a tie. The script stops if a margin is smaller.
"""

import argparse
import logging
import shutil
from pathlib import Path

import torch
import transformers
from oracle import greedy, require_margin, write_sections
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 128
PROMPT_LENGTHS = (1, 2, 3, 7, 8, 16, 25, 40)
MAX_NEW_TOKENS = 24
SMALLEST_MARGIN = 0.01
WEIGHT_STD = 0.4

log = logging.getLogger("make_tiny_llama")


def plain_config() -> LlamaConfig:
    """Tied head, default rope; EOS id 2."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
    )


def llama3_config() -> LlamaConfig:
    """Untied head, biases, Llama-3 rope scaling; 64 original positions, so each band has pairs."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=0,
        eos_token_id=None,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )


def random_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A float32 model, every parameter random: biases and norm weights too, which would start as 0 and 1."""
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1.0 + 0.2 * noise if is_norm else WEIGHT_STD * noise)
    return model


def save_plain(model: LlamaForCausalLM, out: Path) -> None:
    """Writes `single/` and `sharded/` from one model."""
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(out / "single")
    model.save_pretrained(out / "sharded", max_shard_size="30KB")
    (out / "sharded" / "generation_config.json").unlink()


def records(model: LlamaForCausalLM, seed: int) -> list[dict]:
    """One record per prompt length."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in PROMPT_LENGTHS:
        prompt_ids = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        output = greedy(model, prompt_ids, max_new_tokens=MAX_NEW_TOKENS)
        require_margin(f"prompt of {length}", output, SMALLEST_MARGIN)
        log.info("%d: %s", length, output["tokens"])
        found.append({"prompt_ids": prompt_ids} | output)
    log.info("smallest margin: %.4f", min(min(record["margins"]) for record in found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny_llama folder with transformers.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write (replaced if it exists)")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)

    if args.out.exists():
        shutil.rmtree(args.out)
    plain = random_model(plain_config(), seed=7)
    save_plain(plain, args.out)
    llama3 = random_model(llama3_config(), seed=2)
    llama3.save_pretrained(args.out / "llama3")

    header = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    sections = {"plain": records(plain, seed=2), "llama3": records(llama3, seed=3)}
    write_sections(args.out / "goldens.json", header, sections)


if __name__ == "__main__":
    main()
