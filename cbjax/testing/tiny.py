"""A model that is made in no time: random, deterministic, and small enough to compile within a second or two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbjax.causal_lm import CausalLM
from cbjax.models import DecoderConfig

if TYPE_CHECKING:
    from cbjax.text import Tokenizer

_TINY: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 256,
}


def tiny_llama(
    seed: int = 0, dtype: str = "float32", *, tokenizer: Tokenizer | None = None, **overrides: Any
) -> CausalLM:
    """A random decoder of the Llama family: 2 layers, 4 heads of which 2 hold keys and values, 256 positions.

    Its vocabulary of 258 ids is that of `ByteTokenizer`. Without a tokenizer it has no EOS ids.

    Args:
      seed: of the weights; the same seed gives the same model.
      dtype: "float32" or "bfloat16".
      tokenizer: for prompts and answers in text; its EOS ids become the model's.
      overrides: fields of `DecoderConfig`.

    Raises:
      TypeError, ValueError: as `DecoderConfig`.
    """
    config = DecoderConfig(**(_TINY | overrides))
    return CausalLM.from_config(config, dtype=dtype, seed=seed, tokenizer=tokenizer)
