"""The decoder: two functions, `hidden` and `logits`, that know nothing of batches, caches or requests.

Everything between tokens goes through the `attend` argument (see `cbjax.attention.contract`), so the same module is
a training forward with dense attention and a served model with a paged one.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.attention.contract import Attend
from cbjax.models.config import DecoderConfig
from cbjax.models.layers import DType, Embedding, GatedMLP, Linear, RMSNorm, contract_last
from cbjax.models.rope import RopeTables, apply_rope, rope_tables

# Scales of a random model. The embedding adds little to the residual stream and the logits have this spread: the
# next token depends on the whole context, and two candidates are seldom within rounding of each other.
_EMBEDDING_STD = 0.1
_LOGIT_STD = 3.0


class Attention(nnx.Module):
    """Grouped-query attention: projections and rotary positions around one call of `attend`."""

    def __init__(self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs):
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"bias": config.qkv_bias, "dtype": dtype, "rngs": rngs}
        self.q = Linear(config.hidden_size, width, **qkv)
        self.k = Linear(config.hidden_size, kv_width, **qkv)
        self.v = Linear(config.hidden_size, kv_width, **qkv)
        self.o = Linear(width, config.hidden_size, bias=config.out_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            norm = {"eps": config.rms_norm_eps, "dtype": dtype, "rngs": rngs}
            self.q_norm, self.k_norm = RMSNorm(config.head_dim, **norm), RMSNorm(config.head_dim, **norm)
        self.head_dim = config.head_dim
        self.config = config

    def __call__(self, layer: int, x: jax.Array, rope: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("qkv"):
            q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
            if self.config.qk_norm:
                q, k = _norm_heads(self.q_norm, q), _norm_heads(self.k_norm, k)
            if self.config.rotates(layer):
                q, k = apply_rope(q, rope), apply_rope(k, rope)
        scale = self.head_dim**-0.5 if self.config.attention_scale is None else self.config.attention_scale
        with jax.named_scope("attend"):
            mixed = attend(layer, q, k, v, scale=scale, window=self.config.window(layer))
        with jax.named_scope("out"):
            return self.o(mixed.reshape(mixed.shape[0], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self.head_dim)


class DecoderLayer(nnx.Module):
    """One pre-norm block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs):
        norm = {"eps": config.rms_norm_eps, "dtype": dtype, "rngs": rngs}
        self.attn_norm = RMSNorm(config.hidden_size, **norm)
        self.attn = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, **norm)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.multiplier = config.residual_multiplier

    def __call__(self, layer: int, x: jax.Array, rope: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("attn"):
            x = x + _scaled(self.attn(layer, self.attn_norm(x), rope, attend), self.multiplier)
        with jax.named_scope("mlp"):
            return x + _scaled(self.mlp(self.mlp_norm(x)), self.multiplier)


class Decoder(nnx.Module):
    """A decoder of the Llama family with randomly initialised weights (checkpoints replace them).

    Weights are per layer and the layers are unrolled: stacked weights in a scan cost a copy of each layer's slice.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, std=_EMBEDDING_STD, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        unit_std = _EMBEDDING_STD * math.sqrt(config.hidden_size) if config.tie_embeddings else 1.0
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, gain=_LOGIT_STD / unit_std, dtype=dtype, rngs=rngs
        )
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """States after the final norm, [tokens, hidden], of tokens i32[tokens] at positions i32[tokens].

        `attend` is called once for each layer, with layer numbers 0, 1, 2, ... in this order.
        """
        with jax.named_scope("embed"):
            x = _scaled(self.embed(tokens), self.config.embedding_multiplier)
        with jax.named_scope("rope"):
            rope = rope_tables(self.config.rope, self.config.head_dim, positions, x.dtype)
        for index, block in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                x = block(index, x, rope, attend)
        with jax.named_scope("norm"):
            return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 scores [rows, vocab] of the next token, from hidden [rows, hidden]."""
        weight = self.embed.weight if self.config.tie_embeddings else self.head.weight
        with jax.named_scope("logits"):
            scores = contract_last(hidden, weight[...], out_dtype=jnp.float32)
            return scores if self.config.logits_divisor == 1.0 else scores / self.config.logits_divisor


def _norm_heads(norm: RMSNorm, x: jax.Array) -> jax.Array:
    """Norms each head of x [tokens, heads, head_dim] on its own."""
    return norm(x.reshape(-1, x.shape[2])).reshape(x.shape)


def _scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """x times the multiplier, which is not rounded to x's dtype; x itself if it is 1."""
    return x if multiplier == 1.0 else (x.astype(jnp.float32) * multiplier).astype(x.dtype)
