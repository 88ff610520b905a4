"""`PagedAttend`: the `attend` of a served model, alive for one trace."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core

from cbjax.attention.contract import layer_spec
from cbjax.attention.implementation import Attention
from cbjax.attention.store import StoreSpec


class PagedAttend:
    """`Attend` over a block-table KV store: each call updates the array of `kv` that the layer lies in.

    It holds tracers, so it is valid only in the trace that made it, and each call checks that: under
    `jax.checkpoint`, `jax.lax.scan` or `jax.vmap` the new arrays would belong to the inner trace and leak.
    """

    def __init__(self, kv: Sequence[jax.Array], steps: Sequence[Any], store: StoreSpec):
        """kv: the store's arrays; steps: of each group, from `StoreSpec.prepare`."""
        self._kv = list(kv)
        self._steps, self._store = tuple(steps), store
        self._trace = _current_trace()

    @property
    def kv(self) -> list[jax.Array]:
        """The store's arrays after the calls so far."""
        return list(self._kv)

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
        spec = layer_spec(layer, q, k, v, window=window, soft_cap=soft_cap, sinks=sinks)
        if _current_trace() != self._trace:
            raise RuntimeError(
                f"attend, layer {layer}: PagedAttend was made in another trace than this call's. A served model must "
                "call it outside jax.checkpoint, jax.vmap and jax.lax.scan; in a scan over layers call "
                "cbjax.attention.paged_attention, which takes and returns the KV array."
            )
        groups = self._store.groups
        places = groups.places
        if not 0 <= layer < len(places):
            raise ValueError(f"attend, layer {layer}: the KV store has {len(places)} layers, 0 to {len(places) - 1}.")
        group, array = places[layer]
        held = groups.windows[group]
        if held is not None and (window is None or window > held):
            raise ValueError(
                f"attend, layer {layer}: the KV store keeps the last {held} tokens of this layer, as its recorded call "
                f"asked. Got window {window}; a layer's window must not depend on the call."
            )
        kv_heads, head_dim = groups.shapes[array]
        if (kv_heads, head_dim) != (spec.num_kv_heads, spec.head_dim):
            raise ValueError(
                f"attend, layer {layer}: the KV store has {kv_heads} kv heads of {head_dim}. "
                f"Got {spec.num_kv_heads} of {spec.head_dim}."
            )
        out, self._kv[array] = _attend(
            self._store.attention,
            q,
            k,
            v,
            self._kv[array],
            self._steps[group],
            sinks,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        return out


# Traced once for all layers of a shape instead of once per layer.
@partial(jax.jit, static_argnums=0, static_argnames=("scale", "window", "soft_cap"))
def _attend(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    step: Any,
    sinks: jax.Array | None,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    return attention.attend(q, k, v, kv, step, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)


def _current_trace() -> object:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")
