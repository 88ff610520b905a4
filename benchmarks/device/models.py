"""Models of random weights, made on the device in seconds however large they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.models import DecoderConfig, abstract_params, build
from cbjax.models.params import flatten, unflatten

if TYPE_CHECKING:
    from cbjax import CausalLM

LLAMA_3_8B = DecoderConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, max_positions=8192,
)  # fmt: skip
TINY = DecoderConfig(
    vocab_size=258, hidden_size=128, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
    max_positions=512,
)  # fmt: skip
# Standard deviation of weights, as transformers draws them.
DEVIATION = 0.02


def random_model(config: DecoderConfig, dtype: str) -> CausalLM:
    """As `CausalLM.from_config`, but drawn array by array.

    That makes one program of all arrays, which takes the compiler minutes for a large model; here it is one for each
    shape that they have.
    """
    from cbjax import CausalLM

    graphdef = build(config, dtype)
    arrays = {
        path: _drawn(jax.random.key(number, impl="rbg"), leaf.shape, leaf.dtype)
        for number, (path, leaf) in enumerate(flatten(abstract_params(config, dtype)).items())
    }
    return CausalLM(
        lambda params: nnx.merge(graphdef, params),
        unflatten(arrays),
        max_positions=config.max_positions,
        dtype=dtype,
        config=config,
    )


@partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Vectors are scales of norms here."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (DEVIATION * jax.random.normal(key, shape, dtype)).astype(dtype)
