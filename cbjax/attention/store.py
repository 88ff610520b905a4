"""`StoreSpec`: a whole store as a value, its arrays, the layers that lie in them and who attends over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from cbjax.attention.groups import LayerGroups
from cbjax.attention.implementation import XLA, Attention, GroupSizes
from cbjax.attention.spec import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """See the module's docstring; made by `store_spec`.

    Attributes:
        groups: which layer lies in which array, under which group's table.
        arrays: one for each layer of a group.
        attention: reads and writes them.
    """

    groups: LayerGroups
    arrays: tuple[KVSpec, ...]
    attention: Attention

    def prepare(self, tables: jax.Array, *rows: jax.Array, num_tokens: int, single_token_rows: bool) -> list[Any]:
        """What `attention` makes of a step for each group; tables i32[groups, slots + 1, max_blocks].

        The other arguments are those of `prepare_batch`. What does not depend on a group's table is the same in all of
        them, and the compiler keeps one.
        """
        return [
            self.attention.prepare(
                tables[group],
                *rows,
                num_tokens=num_tokens,
                block_size=self.arrays[0].block_size,
                num_blocks=self.arrays[0].num_blocks,
                single_token_rows=single_token_rows,
                group=GroupSizes(
                    window=window,
                    most_queries=self.groups.most_queries,
                    fewest_kv_heads=min(kv_heads for kv_heads, _ in self.groups.shapes),
                ),
            )
            for group, window in enumerate(self.groups.windows)
        ]


def store_spec(
    groups: LayerGroups,
    *,
    num_blocks: int,
    block_size: int,
    dtype: jax.typing.DTypeLike,
    attention: Attention = XLA,
) -> StoreSpec:
    """The store of these layers: as many arrays as a group has layers."""
    arrays = tuple(
        KVSpec(
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=dtype,
            layout=attention.layout,
        )
        for kv_heads, head_dim in groups.shapes
    )
    return StoreSpec(groups=groups, arrays=arrays, attention=attention)
