"""Products with weights, and the order in which they add up.

How a library adds up a product depends on the number of rows, so a row's bits can depend on how many stand beside it.
`product_form` chooses between speed and a form in which they do not; it is part of what a program is compiled for, as
jax's own precision settings are, so no model has to hand it on.
"""

import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

DType = jax.typing.DTypeLike

# Rows of a weight matrix that are multiplied together in `_weights_first`, and rows of activations in `_by_tiles`.
TILE = 64
# Numbers of a product that still fit a core's cache while they are turned round.
_MAX_TURNED = 2**20


class ProductForm(enum.Enum):
    """How products are computed.

    FASTEST: few rows may be added up in another order than many.
    ROWS: one form for any number of rows; the bits are the same where the backend's product keeps them, as a CPU's do.
    TILES: 64 rows at a time, filled up with zeros: the backend only ever sees one shape.
    """

    FASTEST = "the fastest for each number of rows"
    ROWS = "one form for any number of rows"
    TILES = f"in tiles of {TILE} rows"


# A context manager: `with product_form(ProductForm.ROWS): ...` around what is traced.
product_form = jax.make_user_context(ProductForm.FASTEST)


@functools.partial(jax.jit, static_argnames="out_dtype")
def contract_last(x: jax.Array, weight: jax.Array, out_dtype: DType | None = None) -> jax.Array:
    """x [rows, in] and weight [out, in] -> [rows, out], in x's dtype unless `out_dtype` says otherwise."""
    plain = functools.partial(activations_first, out_dtype=out_dtype)
    if product_form.value is not ProductForm.FASTEST or not _gains_from_turning(x, weight):
        return plain(x, weight)
    return jax.lax.platform_dependent(
        x, weight, cpu=functools.partial(_weights_first, out_dtype=out_dtype), default=plain
    )


def activations_first(
    x: jax.Array, weight: jax.Array, *, out_dtype: DType | None = None, precision: str | None = None
) -> jax.Array:
    """As `contract_last`, with bits that do not depend on the number of rows as far as `product_form` can help it."""

    def product(x: jax.Array) -> jax.Array:
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=out_dtype)

    return _by_tiles(product, x) if product_form.value is ProductForm.TILES else product(x)


def _by_tiles(product: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """product(x [rows, in]) from products of TILE rows each."""
    tiles = jnp.pad(x, ((0, -x.shape[0] % TILE), (0, 0))).reshape(-1, TILE, x.shape[1])
    # A loop even around a single tile, so that every program compiles the product in the same surroundings.
    products = jax.lax.map(product, tiles)
    return products.reshape(-1, products.shape[2])[: x.shape[0]]


def _gains_from_turning(x: jax.Array, weight: jax.Array) -> bool:
    rows, tiles = x.shape[0], weight.shape[0] // TILE
    few = TILE if weight.dtype == jnp.bfloat16 else 1
    return weight.shape[0] == tiles * TILE and few <= rows <= 2 * TILE and rows * weight.shape[0] <= _MAX_TURNED


def _weights_first(x: jax.Array, weight: jax.Array, *, out_dtype: DType | None) -> jax.Array:
    """The transposed product, for few rows on a CPU: there the second operand is repacked, which should not be the
    weights. In tiles, since a plain product of this shape can end up on one core. The barrier keeps the compiler from
    turning the product round again.
    """
    tiles = weight.reshape(-1, TILE, weight.shape[1])
    product = jax.lax.dot_general(tiles, x, (((2,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return jax.lax.optimization_barrier(product).reshape(-1, x.shape[0]).T
