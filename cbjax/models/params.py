"""Parameters as plain nested dicts: string keys, and ints for places in a list.

`jax.jit` dispatches a plain dict of a 30-layer model about fifty times faster than the module itself, so a model is
split once, when it is loaded, into `build(config, dtype)` (static) and a nested dict (an argument of every step);
`nnx.merge(build(config, dtype), params)` inside a trace gives the `Decoder` back.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from cbjax.models.config import DecoderConfig
from cbjax.models.decoder import Decoder
from cbjax.models.layers import DType

type Path = tuple[str | int, ...]
type Params = dict[str | int, Any]


def build(config: DecoderConfig, dtype: DType = jnp.float32) -> nnx.GraphDef[Decoder]:
    """The static part of a `Decoder`: hashable, without arrays."""
    return _split(config, jnp.dtype(dtype))[0]


def abstract_params(config: DecoderConfig, dtype: DType = jnp.float32) -> Params:
    """Nested dict of `jax.ShapeDtypeStruct`, one per parameter; allocates nothing."""
    return unflatten(_split(config, jnp.dtype(dtype))[1])


def init_params(config: DecoderConfig, dtype: DType = jnp.float32, seed: int = 0) -> Params:
    """Nested dict of random arrays, the same for the same arguments. For tests and simulation."""
    return _initializer(config, jnp.dtype(dtype))(jax.random.key(seed))


@functools.cache
def _initializer(config: DecoderConfig, dtype: jnp.dtype) -> Callable[[jax.Array], Params]:
    """Compiled once per configuration, however often it is called."""
    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Decoder(config, dtype=dtype, rngs=nnx.Rngs(key)))))


def flatten(params: Mapping[str | int, Any]) -> dict[Path, Any]:
    """{("layers", 0, "attn", "q", "weight"): leaf, ...}, in the order of the nested mapping."""
    flat: dict[Path, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat.update({(key, *rest): leaf for rest, leaf in flatten(value).items()})
        else:
            flat[(key,)] = value
    return flat


def unflatten(flat: Mapping[Path, Any]) -> Params:
    """The inverse of `flatten`, made of fresh dicts. Raises ValueError where one path is the start of another."""
    nested: Params = {}
    for path, leaf in flat.items():
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"Parameter paths must not start with one another. Got {path!r} below a leaf.")
        if path[-1] in node:
            raise ValueError(f"Parameter paths must not start with one another. Got {path!r} above others.")
        node[path[-1]] = leaf
    return nested


@functools.cache
def _split(config: DecoderConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef[Decoder], dict[Path, Any]]:
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return graphdef, flatten(cast(Params, nnx.to_pure_dict(state)))


def check_same_params(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
    """Whether `new` can take the place of `old`.

    Raises:
      ValueError: another structure, shape or dtype; it names the first difference.
    """
    before, after = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (old, new)
    )
    for path in (*before, *after):
        was, comes = _described(before.get(path)), _described(after.get(path))
        if was != comes:
            raise ValueError(
                f"new params must have the structure, shapes and dtypes of the old ones; at {path} the old ones have "
                f"{was} and the new ones {comes}"
            )
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError("new params must be nested dicts as the old ones are")


def _described(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
