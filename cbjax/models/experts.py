"""A mixture of experts over flat tokens, x [tokens, features].

It is computed densely: every expert on every token, one expert after another, and what a token's router did not choose
adds nothing. So a token's bits depend on no other token, and no token is ever dropped; the price is
`num_experts / per_token` times the arithmetic of the experts that were chosen.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.models.config import ExpertsConfig
from cbjax.models.layers import DType, Linear, normal
from cbjax.models.products import contract_last


class StackedLinear(nnx.Module):
    """One `Linear` per expert: weight [experts, out, in], bias [experts, out]."""

    def __init__(self, experts: int, in_features: int, out_features: int, *, dtype: DType, rngs: nnx.Rngs):
        std = 1.0 / math.sqrt(in_features)
        self.weight = normal(rngs, (experts, out_features, in_features), std=std, dtype=dtype)
        self.bias = normal(rngs, (experts, out_features), std=0.1, dtype=dtype)


class Experts(nnx.Module):
    """sum of weight_e * down_e((up_e(x) + 1) * gate_e(x) * sigmoid(alpha * gate_e(x))) over the experts e chosen.

    `gate_up` holds the rows of gate, then those of up. The sum is in float32, in the order of the experts.
    """

    def __init__(self, config: ExpertsConfig, features: int, hidden: int, *, dtype: DType, rngs: nnx.Rngs):
        self.router = Linear(features, config.num_experts, bias=True, dtype=dtype, rngs=rngs)
        self.gate_up = StackedLinear(config.num_experts, features, 2 * hidden, dtype=dtype, rngs=rngs)
        self.down = StackedLinear(config.num_experts, hidden, features, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        def add(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            weight, gate_up, gate_up_bias, down, down_bias = expert
            gate, up = jnp.split(contract_last(x, gate_up) + gate_up_bias[None, :], 2, axis=1)
            out = contract_last(self._gated(gate, up), down) + down_bias[None, :]
            # A NaN or an infinity of an expert that was not chosen stays out, too.
            chosen = (weight > 0)[:, None]
            return total + jnp.where(chosen, weight[:, None] * out.astype(jnp.float32), jnp.float32(0.0)), None

        stacks = (self.gate_up.weight, self.gate_up.bias, self.down.weight, self.down.bias)
        experts = (self._weights(x).T, *(stack[...] for stack in stacks))
        return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), experts)[0].astype(x.dtype)

    def _weights(self, x: jax.Array) -> jax.Array:
        """f32[tokens, experts], 0 for the experts that were not chosen."""
        best, chosen = jax.lax.top_k(self.router(x).astype(jnp.float32), self.config.per_token)
        exponentials = jnp.exp(best - best[:, :1])
        # Not as a reduction: on CPU that adds in an order that depends on the number of tokens.
        columns = [exponentials[:, place] for place in range(self.config.per_token)]
        weights = exponentials / functools.reduce(operator.add, columns)[:, None]
        is_chosen = chosen[:, :, None] == jnp.arange(self.config.num_experts, dtype=chosen.dtype)[None, None, :]
        return jnp.sum(jnp.where(is_chosen, weights[:, :, None], jnp.float32(0.0)), axis=1)

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.config.limit), jnp.clip(up, -self.config.limit, self.config.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(gate * self.config.alpha))
