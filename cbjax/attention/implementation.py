"""Attention implementations, as values: how a step's rows are prepared once, and how each layer attends over them.

The one with Pallas kernels is in `cbjax.attention.pallas`, which is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from cbjax.attention.batch import prepare_batch, token_places
from cbjax.attention.eager import EagerBatch, eager_attention
from cbjax.attention.spec import LayoutName
from cbjax.attention.xla import attend_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """What the layers of a group have.

    Attributes:
        window: of all of them; None is the whole context.
        most_queries: query heads of a kv head, at most.
        fewest_kv_heads: of a layer.
    """

    window: int | None = None
    most_queries: int = 1
    fewest_kv_heads: int = 1


class Step(Protocol):
    """What an implementation makes of a step's rows; all layers of a group share it."""

    @property
    def position(self) -> jax.Array:
        """i32[tokens], each token's place in its row; 0 for padding."""
        ...


class Attention(Protocol):
    """One way to attend over a block-table KV store. A value: equal ones compile the same programs.

    Attributes:
        name: as in `attn_implementation`.
        layout: of the store.
    """

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> LayoutName: ...

    def prepare(
        self,
        *rows: jax.Array,
        num_tokens: int,
        block_size: int,
        num_blocks: int,
        single_token_rows: bool,
        group: GroupSizes,
    ) -> Any:
        """A `Step` for the layers of a group; rows and sizes as in `prepare_batch`."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv: jax.Array,
        step: Any,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Writes the step's keys and values, then attends: [tokens, heads, head_dim] and the new store."""
        ...


@dataclass(frozen=True, slots=True)
class XlaAttention:
    """`cbjax.attention.xla`: portable, and the one for CPUs."""

    name: str = "xla"
    layout: LayoutName = "head_major"

    def prepare(self, *rows: jax.Array, group: GroupSizes, **sizes: Any) -> Any:
        return prepare_batch(*rows, **sizes)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, step: Any, **options: Any) -> Any:
        return attend_batch(q, k, v, kv, step, **options)


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """`cbjax.attention.eager`: a token at a time, over all its context at once; short, and slow."""

    name: str = "eager"
    layout: LayoutName = "head_major"

    def prepare(self, *rows: jax.Array, group: GroupSizes, **sizes: Any) -> Any:
        table, slot, *_ = rows
        places = token_places(*rows, **sizes)
        return EagerBatch(table=table[slot[places.row]], places=places)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, step: Any, **options: Any) -> Any:
        return eager_attention(q, k, v, kv, step, **options)


XLA = XlaAttention()
