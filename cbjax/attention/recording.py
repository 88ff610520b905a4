"""Learns what a model needs of a KV store by tracing it once, without running it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cbjax.attention.contract import Attend, LayerSpec, layer_spec


class RecordingAttend:
    """An `Attend` that returns zeros and notes each layer's shape in `specs`, in order."""

    def __init__(self) -> None:
        self.specs: list[LayerSpec] = []

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        del scale
        spec = layer_spec(layer, q, k, v, window=window, soft_cap=soft_cap, sinks=sinks)
        if layer != len(self.specs):
            raise ValueError(
                "A model must call attend once per layer, with layers 0, 1, 2, ... in order. "
                f"Got layer {layer} in place of {len(self.specs)}."
            )
        self.specs.append(spec)
        return jnp.zeros_like(q)


def record_layers(hidden: Callable[[jax.Array, jax.Array, Attend], Any]) -> tuple[LayerSpec, ...]:
    """The layers of `hidden(tokens i32[tokens], positions i32[tokens], attend)`, found by one `jax.eval_shape`.

    Raises:
        ValueError: a layer is called twice, out of order or with shapes that do not fit, or there is none.
        TypeError: a layer number is not a Python int (a scan over layers).
    """
    attend = RecordingAttend()
    flat = jax.ShapeDtypeStruct((2,), jnp.int32)
    jax.eval_shape(lambda tokens, positions: hidden(tokens, positions, attend), flat, flat)
    if not attend.specs:
        raise ValueError("A model must call attend once per layer. It was never called.")
    return tuple(attend.specs)
