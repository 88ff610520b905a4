"""The `attend` contract: what a model calls once per layer, and nothing else, to look at other tokens.

A model is two functions, `hidden(tokens, positions, attend)` and `logits(hidden)`. In each layer, once, in order, it
calls `attend(layer, q, k, v, ...)`. Whoever runs the model chooses what that does: `DenseAttend` (training forward
and oracle), `record_layers` (learns every layer's shape), `PagedAttend` (reads and writes a block-table KV store).
"""

from dataclasses import dataclass
from typing import Protocol

import jax


class Attend(Protocol):
    """Causal attention of one layer over flat tokens."""

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
        """Mixes values over the context of each token.

        Args:
            layer: number of the layer, 0, 1, 2, ... in the order of the calls; a Python int.
            q: [tokens, heads, head_dim], positions already applied; `heads` is a multiple of `kv_heads`, and query
                head h reads kv head `h // (heads / kv_heads)`.
            k: [tokens, kv_heads, head_dim], positions already applied.
            v: [tokens, kv_heads, head_dim].
            scale: multiplies the scores; None is `head_dim ** -0.5`.
            window: a token sees itself and the `window - 1` tokens before it; None is the whole context.
            soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
            sinks: [heads], a logit per head that takes part in the softmax's denominator and has no value.

        Returns:
            [tokens, heads, head_dim] in q's dtype.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer needs of a KV store.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        window: tokens a query sees, itself included; None is the whole context.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


def layer_spec(
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> LayerSpec:
    """Checks the arguments of an `attend` call. Raises TypeError or ValueError that name the layer."""
    if not isinstance(layer, int):
        raise TypeError(
            f"attend needs a Python int as layer. Got {type(layer).__name__}. Inside jax.lax.scan call "
            "cbjax.attention.paged_attention with one flat pool and block ids offset by layer."
        )
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(
            f"attend, layer {layer}: expected q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. "
            f"Got q {q.shape}, k {k.shape}, v {v.shape}."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attend, layer {layer}: heads must be a multiple of kv_heads. Got {q.shape[1]} and {k.shape[1]}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"attend, layer {layer}: q, k and v must share a dtype. Got {q.dtype}, {k.dtype}, {v.dtype}.")
    if window is not None and window < 1:
        raise ValueError(f"attend, layer {layer}: window counts the token itself, at least 1. Got {window}.")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"attend, layer {layer}: soft_cap must be positive. Got {soft_cap}.")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"attend, layer {layer}: expected sinks [heads] = ({q.shape[1]},). Got {sinks.shape}.")
    return LayerSpec(num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], window=window)
