"""The parts of a decoder as Flax NNX modules over flat tokens: x is [tokens, features], there is no batch axis.

Every row is computed with the same bits however many rows there are, from 64 up (in bfloat16 from 2 up). On CPU that
rules out two natural forms: matrices stored [in, out] (here they are [out, in], contracted over their last axis) and
sums as reductions (here they are products with ones). Fewer rows of float32 are added up in another order, for speed,
unless `product_form` says otherwise.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.models.config import Activation
from cbjax.models.products import DType, activations_first, contract_last


class Linear(nnx.Module):
    """x [rows, in] -> [rows, out]: weight [out, in], bias [out] or None."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: DType,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        std = gain / math.sqrt(in_features)
        self.weight = normal(rngs, (out_features, in_features), std=std, dtype=dtype)
        self.bias = normal(rngs, (out_features,), std=0.1, dtype=dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = contract_last(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class Embedding(nnx.Module):
    """tokens i32[tokens] -> [tokens, features]: weight [vocab, features]."""

    def __init__(self, num_embeddings: int, features: int, *, std: float, dtype: DType, rngs: nnx.Rngs):
        self.weight = normal(rngs, (num_embeddings, features), std=std, dtype=dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # An id outside the vocabulary becomes NaN, which its request's finite flag reports, instead of the
        # row of another token that a clamped read would give.
        rows = self.weight[...].at[tokens]
        return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class RMSNorm(nnx.Module):
    """Root mean square norm in float32, times weight [features] + `offset`.

    The product is in the model's dtype, or, if `wide`, in float32 and rounded afterwards.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        dtype: DType,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        offset: float = 0.0,
        wide: bool = False,
    ):
        self.weight = normal(rngs, (features,), mean=gain - offset, std=0.1 * gain, dtype=dtype)
        self.eps = eps
        self.offset = offset
        self.wide = wide

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(_row_sums(jnp.square(wide)) / x.shape[1] + self.eps)
        # Weights are kept as they are stored: added in the model's dtype, the offset would cost them bits.
        weight = self.weight[...] if self.offset == 0.0 else self.weight[...].astype(jnp.float32) + self.offset
        if self.wide:
            return (weight.astype(jnp.float32)[None, :] * normed).astype(x.dtype)
        return weight.astype(x.dtype)[None, :] * normed.astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        bias: bool,
        dtype: DType,
        rngs: nnx.Rngs,
        activation: Activation = "silu",
    ):
        self.gate = Linear(features, hidden, bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(features, hidden, bias=bias, dtype=dtype, rngs=rngs)
        # The product of the two branches has about a quarter of the input's scale; the gain restores it.
        self.down = Linear(hidden, features, bias=bias, dtype=dtype, rngs=rngs, gain=2.0)
        self.activate = {"silu": _silu, "gelu_tanh": _gelu_tanh}[activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activate(self.gate(x)) * self.up(x))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, mean: float = 0.0, std: float, dtype: DType) -> nnx.Param:
    """A parameter of random numbers, drawn in float32."""
    values = mean + std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values.astype(dtype))


def _row_sums(x: jax.Array) -> jax.Array:
    """Sums of x [rows, features], [rows, 1].

    As a product with (two columns of) ones: a reduction on CPU adds in an order that depends on the number of rows.
    """
    return activations_first(x, jnp.ones((2, x.shape[1]), x.dtype), precision="highest")[:, :1]


def _silu(x: jax.Array) -> jax.Array:
    """x times its sigmoid, rounded to x's dtype once; operation by operation a CPU takes twice as long for bfloat16."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, rounded to x's dtype once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
