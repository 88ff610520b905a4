"""Attention of one layer: all that is between the norm and the residual stream, around one call of `attend`."""

import jax
from flax import nnx

from cbjax.attention.contract import Attend
from cbjax.models.config import DecoderConfig
from cbjax.models.layers import DType, Linear, RMSNorm, normal
from cbjax.models.rope import RopeTables, apply_rope


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
            self.q_norm, self.k_norm = (make_norm(config, config.head_dim, dtype=dtype, rngs=rngs) for _ in "qk")
        if config.sinks:
            self.sinks = normal(rngs, (config.num_heads,), std=1.0, dtype=dtype)
        self.head_dim = config.head_dim
        self.config = config

    def __call__(self, layer: int, x: jax.Array, rope: RopeTables, attend: Attend) -> jax.Array:
        with jax.named_scope("qkv"):
            q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
            if self.config.qk_norm:
                q, k = norm_heads(self.q_norm, q), norm_heads(self.k_norm, k)
            if self.config.rotates(layer):
                q, k = apply_rope(q, rope), apply_rope(k, rope)
        scale = self.head_dim**-0.5 if self.config.attention_scale is None else self.config.attention_scale
        with jax.named_scope("attend"):
            mixed = attend(
                layer,
                q,
                k,
                v,
                scale=scale,
                window=self.config.window(layer),
                soft_cap=self.config.attention_soft_cap,
                sinks=self.sinks[...] if self.config.sinks else None,
            )
        with jax.named_scope("out"):
            return self.o(mixed.reshape(mixed.shape[0], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self.head_dim)


def norm_heads(norm: RMSNorm, x: jax.Array) -> jax.Array:
    """Norms each head of x [tokens, heads, head_dim] on its own."""
    return norm(x.reshape(-1, x.shape[2])).reshape(x.shape)


def make_norm(config: DecoderConfig, features: int, *, dtype: DType, rngs: nnx.Rngs, gain: float = 1.0) -> RMSNorm:
    """A norm over `features` as all norms of the decoder are."""
    return RMSNorm(
        features,
        eps=config.rms_norm_eps,
        offset=config.norm_offset,
        wide=config.wide_norms,
        gain=gain,
        dtype=dtype,
        rngs=rngs,
    )
