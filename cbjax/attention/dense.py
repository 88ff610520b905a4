"""Dense causal attention: O(tokens^2) memory, no state. The training forward and an oracle for the paged kernels."""

import jax
import jax.numpy as jnp

from cbjax.attention.contract import layer_spec
from cbjax.attention.online_softmax import MASKED


class DenseAttend:
    """`Attend` over tokens that are all in the call; pure, so it works under jit, grad, vmap and checkpoint.

    Token j is seen by token i if they share a segment and position j <= position i (and the window reaches it).
    """

    def __init__(self, positions: jax.Array, segment_ids: jax.Array | None = None):
        """positions i32[tokens] within each segment; segment_ids i32[tokens] (None: all tokens are one segment)."""
        if segment_ids is not None and segment_ids.shape != positions.shape:
            raise ValueError(
                f"segment_ids must have the shape of positions {positions.shape}. Got {segment_ids.shape}."
            )
        self.positions = positions
        self.segment_ids = segment_ids

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
        if q.shape[0] != self.positions.shape[0]:
            raise ValueError(
                f"attend, layer {layer}: expected {self.positions.shape[0]} tokens, as many as positions. "
                f"Got {q.shape[0]}."
            )
        factor = spec.head_dim**-0.5 if scale is None else scale
        grouped = q.reshape(q.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        scores = jnp.einsum("ihgd,jhd->hgij", grouped, k, preferred_element_type=jnp.float32) * factor
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(self._visible(window)[None, None], scores, MASKED)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            sink_logits = sinks.astype(jnp.float32).reshape(spec.num_kv_heads, -1, 1, 1)
            highest = jnp.maximum(highest, sink_logits)
        highest = jax.lax.stop_gradient(highest)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sink_logits - highest)
        mixed = jnp.einsum("hgij,jhd->ihgd", weights / total, v.astype(jnp.float32))
        return mixed.reshape(q.shape).astype(q.dtype)

    def _visible(self, window: int | None) -> jax.Array:
        """bool[tokens, tokens]: whether token i (first axis) sees token j."""
        distance = self.positions[:, None] - self.positions[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if self.segment_ids is not None:
            visible &= self.segment_ids[:, None] == self.segment_ids[None, :]
        return visible
