"""The parts of a decoder as Flax NNX modules over flat tokens: x is [tokens, features], there is no batch axis.

Every row is computed with the same bits however many rows there are, from 64 up (in bfloat16 from 2 up). On CPU that
rules out two natural forms: matrices stored [in, out] (here they are [out, in], contracted over their last axis) and
sums as reductions (here they are products with ones). Fewer rows of float32 are added up in another order, for speed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.models.config import Activation

DType = jax.typing.DTypeLike

# Rows of a weight matrix that are multiplied together, see `_weights_first`.
_TILE = 64
# Numbers of a product that still fit a core's cache while they are turned round.
_MAX_TURNED = 2**20


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
        self.activate = {"silu": jax.nn.silu, "gelu_tanh": _gelu_tanh}[activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activate(self.gate(x)) * self.up(x))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, mean: float = 0.0, std: float, dtype: DType) -> nnx.Param:
    """A parameter of random numbers, drawn in float32."""
    values = mean + std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values.astype(dtype))


@functools.partial(jax.jit, static_argnames="out_dtype")
def contract_last(x: jax.Array, weight: jax.Array, out_dtype: DType | None = None) -> jax.Array:
    """x [rows, in] and weight [out, in] -> [rows, out], in x's dtype unless `out_dtype` says otherwise."""
    plain = functools.partial(_activations_first, out_dtype=out_dtype)
    rows, tiles = x.shape[0], weight.shape[0] // _TILE
    few = _TILE if weight.dtype == jnp.bfloat16 else 1
    if weight.shape[0] != tiles * _TILE or not few <= rows <= 2 * _TILE or rows * weight.shape[0] > _MAX_TURNED:
        return plain(x, weight)
    return jax.lax.platform_dependent(
        x, weight, cpu=functools.partial(_weights_first, out_dtype=out_dtype), default=plain
    )


def _activations_first(x: jax.Array, weight: jax.Array, *, out_dtype: DType | None) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _weights_first(x: jax.Array, weight: jax.Array, *, out_dtype: DType | None) -> jax.Array:
    """The transposed product, for few rows on a CPU: there the second operand is repacked, which should not be the
    weights. In tiles, since a plain product of this shape can end up on one core. The barrier keeps the compiler from
    turning the product round again.
    """
    tiles = weight.reshape(-1, _TILE, weight.shape[1])
    product = jax.lax.dot_general(tiles, x, (((2,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return jax.lax.optimization_barrier(product).reshape(-1, x.shape[0]).T


def _row_sums(x: jax.Array) -> jax.Array:
    """Sums of x [rows, features], [rows, 1].

    As a product with (two columns of) ones: a reduction on CPU adds in an order that depends on the number of rows.
    """
    ones = jnp.ones((2, x.shape[1]), x.dtype)
    return jax.lax.dot_general(x, ones, (((1,), (1,)), ((), ())), precision="highest")[:, :1]


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, rounded to x's dtype once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
