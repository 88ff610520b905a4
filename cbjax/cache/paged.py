"""The KV store: device arrays made once, donated to every step and handed back by it.

Store array j holds layer j of every layer group, so a block id belongs to one group at a time. Each array has
`num_blocks + 2` blocks; the two reserved ones are the padding zone of `KVSpec`, which no allocator hands out.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from cbjax.attention import XLA, Attention, KVSpec, LayerGroups, StoreSpec, store_spec


def layout_factor(specs: Sequence[KVSpec]) -> float:
    """Bytes that the device takes for each byte of these arrays' numbers; above 1 where it pads its tiles.

    Asked of the device with one small array of each shape, so no table of layouts is needed.
    """
    sizes = {
        spec: jax.device_put(np.zeros(spec.shape, spec.dtype)).on_device_size_in_bytes()  # pyright: ignore
        for spec in set(specs)
    }
    return sum(sizes[spec] for spec in specs) / sum(spec.layer_bytes for spec in specs)


class PagedAttentionCache:
    """Owns the store's arrays. `kv` is what the next step takes; the step's result is put back into it.

    Attributes:
      store: its arrays' shapes, the layers in them, and who attends over them.
      kv: the arrays, each of its spec's shape.
    """

    def __init__(
        self,
        groups: LayerGroups,
        *,
        num_blocks: int,
        block_size: int,
        dtype: jax.typing.DTypeLike,
        attention: Attention = XLA,
    ) -> None:
        """num_blocks and block_size in blocks and tokens; the arrays are zero."""
        self.store: StoreSpec = store_spec(
            groups, num_blocks=num_blocks, block_size=block_size, dtype=dtype, attention=attention
        )
        self.kv: list[jax.Array] = [spec.zeros() for spec in self.specs]

    @property
    def groups(self) -> LayerGroups:
        """Which layer lies in which array, under which group's table."""
        return self.store.groups

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        """One for each array."""
        return self.store.arrays

    @property
    def block_axis(self) -> int:
        """The axis of the arrays that block ids count."""
        return self.specs[0].block_axis

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out; the arrays have two more."""
        return self.specs[0].num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.specs[0].block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, the reserved blocks included."""
        return sum(spec.block_bytes * (spec.num_blocks + 2) for spec in self.specs)

    @property
    def is_lost(self) -> bool:
        """Whether a donation was not completed, so that the arrays are gone."""
        return not self.kv or any(array.is_deleted() for array in self.kv)

    def reset(self) -> None:
        """Fresh arrays; what the old ones held is lost."""
        self.close()
        self.kv = [spec.zeros() for spec in self.specs]

    def close(self) -> None:
        """Gives the memory back now, whoever else holds references."""
        for array in self.kv:
            if not array.is_deleted():
                array.delete()
        self.kv = []
