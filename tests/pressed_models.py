"""Tiny models that tests of KV pressure share: one whose layers see everything, one with windows between those."""

from cbjax import CausalLM
from cbjax.models import DecoderConfig
from cbjax.testing import tiny_llama

NAMES = ("llama", "hybrid")
HYBRID = DecoderConfig(
    vocab_size=258,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    windows=(6, None, 6, None),
)


def make(name: str) -> CausalLM:
    """The model of that name, with the same weights every time."""
    return tiny_llama() if name == "llama" else CausalLM.from_config(HYBRID)
