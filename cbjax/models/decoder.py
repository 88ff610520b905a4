"""The decoder: two functions, `hidden` and `logits`, that know nothing of batches, caches or requests.

Everything between tokens goes through the `attend` argument (see `cbjax.attention.contract`), so the same module is
a training forward with dense attention and a served model with a paged one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cbjax.attention.contract import Attend
from cbjax.models.attention import Attention, make_norm
from cbjax.models.attention import norm_heads as norm_heads
from cbjax.models.config import DecoderConfig
from cbjax.models.experts import Experts
from cbjax.models.layers import DType, Embedding, GatedMLP, Linear, RMSNorm
from cbjax.models.products import contract_last
from cbjax.models.rope import RopeTables, rope_tables

# Scales of a random model. The embedding adds little to the residual stream and the logits have this spread: the
# next token depends on the whole context, and two candidates are seldom within rounding of each other.
_EMBEDDING_STD = 0.1
_LOGIT_STD = 3.0


class DecoderLayer(nnx.Module):
    """One pre-norm block: attention and MLP, each added to the residual stream, behind a norm if `post_norms`."""

    def __init__(self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs):
        norm = functools.partial(make_norm, config, config.hidden_size, dtype=dtype, rngs=rngs)
        self.attn_norm = norm()
        self.attn = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = _make_mlp(config, dtype=dtype, rngs=rngs)
        self.attn_post_norm, self.mlp_post_norm = (norm(), norm()) if config.post_norms else (None, None)
        self.multiplier = config.residual_multiplier

    def __call__(self, layer: int, x: jax.Array, rope: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attn"):
            x = self._add(x, self.attn(layer, self.attn_norm(x), rope, attend), self.attn_post_norm)
        with jax.named_scope("mlp"):
            return self._add(x, self.mlp(self.mlp_norm(x)), self.mlp_post_norm)

    def _add(self, x: jax.Array, branch: jax.Array, post_norm: RMSNorm | None) -> jax.Array:
        branch = branch if post_norm is None else post_norm(branch)
        return x + _scaled(branch, self.multiplier)


class Decoder(nnx.Module):
    """A decoder with randomly initialised weights (checkpoints replace them).

    Weights are per layer and the layers are unrolled: stacked weights in a scan cost a copy of each layer's slice.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, std=_EMBEDDING_STD, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        unit_std = _EMBEDDING_STD * math.sqrt(config.hidden_size) if config.tie_embeddings else 1.0
        self.norm = make_norm(config, config.hidden_size, gain=_LOGIT_STD / unit_std, dtype=dtype, rngs=rngs)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """States after the final norm, [tokens, hidden], of tokens i32[tokens] at positions i32[tokens].

        `attend` is called once for each layer, with layer numbers 0, 1, 2, ... in this order.
        """
        with jax.named_scope("embed"):
            x = self.embed(tokens)
            x = _scaled(x, self._embedding_multiplier(x.dtype))
        with jax.named_scope("rope"):
            # One set of tables for all layers that rotate alike.
            kinds = dict.fromkeys(self.config.layer_rope(index) for index in range(len(self.layers)))
            ropes = {rope: rope_tables(rope, self.config.head_dim, positions, x.dtype) for rope in kinds}
        for index, block in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                x = block(index, x, ropes[self.config.layer_rope(index)], attend)
        with jax.named_scope("norm"):
            return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 scores [rows, vocab] of the next token, from hidden [rows, hidden]."""
        weight = self.embed.weight if self.config.tie_embeddings else self.head.weight
        with jax.named_scope("logits"):
            scores = contract_last(hidden, weight[...], out_dtype=jnp.float32)
            scores = scores if self.config.logits_divisor == 1.0 else scores / self.config.logits_divisor
            cap = self.config.logits_soft_cap
            return scores if cap is None else cap * jnp.tanh(scores / cap)

    def _embedding_multiplier(self, dtype: DType) -> float:
        multiplier = self.config.embedding_multiplier
        return float(np.asarray(multiplier, dtype)) if self.config.round_embedding_multiplier else multiplier


def _make_mlp(config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs) -> GatedMLP | Experts:
    if config.experts is not None:
        return Experts(config.experts, config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        activation=config.activation,
        dtype=dtype,
        rngs=rngs,
    )


def _scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """x times the multiplier, which is not rounded to x's dtype; x itself if it is 1."""
    return x if multiplier == 1.0 else (x.astype(jnp.float32) * multiplier).astype(x.dtype)
