"""`PagedAttend`: the `attend` of a served model, alive for one trace."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.extend.core

from cbjax.attention.batch import PagedBatch
from cbjax.attention.contract import layer_spec
from cbjax.attention.xla import attend_batch


class PagedAttend:
    """`Attend` over a block-table KV store: each call updates one layer's array in `kv`.

    It holds tracers, so it is valid only in the trace that made it, and each call checks that: under
    `jax.checkpoint`, `jax.lax.scan` or `jax.vmap` the new arrays would belong to the inner trace and leak.
    """

    def __init__(self, kv: Sequence[jax.Array], batch: PagedBatch):
        """kv: one array per layer, `KVSpec.shape`; batch: the step's index tables, from `prepare_batch`."""
        self._kv = list(kv)
        self._batch = batch
        self._trace = _current_trace()

    @property
    def kv(self) -> list[jax.Array]:
        """The layers' arrays after the calls so far."""
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
        if not 0 <= layer < len(self._kv):
            raise ValueError(
                f"attend, layer {layer}: the KV store has {len(self._kv)} layers, 0 to {len(self._kv) - 1}."
            )
        kv = self._kv[layer]
        if (kv.shape[1], kv.shape[4]) != (spec.num_kv_heads, spec.head_dim):
            raise ValueError(
                f"attend, layer {layer}: the KV store has {kv.shape[1]} kv heads of {kv.shape[4]}. "
                f"Got {spec.num_kv_heads} of {spec.head_dim}."
            )
        out, self._kv[layer] = _attend(q, k, v, kv, self._batch, sinks, scale=scale, window=window, soft_cap=soft_cap)
        return out


# Traced once for all layers of a shape instead of once per layer.
@partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    batch: PagedBatch,
    sinks: jax.Array | None,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    return attend_batch(q, k, v, kv, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)


def _current_trace() -> object:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")
