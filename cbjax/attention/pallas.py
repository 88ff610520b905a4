"""Attention by the Pallas kernels, which know nothing of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from cbjax.attention.batch import token_places
from cbjax.attention.implementation import GroupSizes
from cbjax.attention.spec import LayoutName
from pallas_kernels.paged_attention import KVLayout, Sizes, attend_planned, plan_step
from pallas_kernels.paged_attention.tpu import Plan


@dataclass(frozen=True, slots=True)
class PallasAttention:
    """`pallas_kernels.paged_attention`, on TPUs.

    Attributes:
        sizes: chunks of keys and values; None: what suits the chip and the store.
        interpret: for `pallas_call`; anywhere else than on a TPU the kernels can only be interpreted.
    """

    sizes: Sizes | None = None
    interpret: Any = False
    name: str = "pallas"
    layout: LayoutName = "tpu"

    def prepare(
        self,
        *rows: jax.Array,
        num_tokens: int,
        block_size: int,
        num_blocks: int,
        single_token_rows: bool,
        group: GroupSizes,
    ) -> Any:
        places = token_places(
            *rows,
            num_tokens=num_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            single_token_rows=single_token_rows,
        )
        plan = plan_step(*rows, num_tokens=num_tokens, group=group.most_queries, single_token_rows=single_token_rows)
        return PallasStep(position=places.position, plan=plan)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, step: Any, **options: Any) -> Any:
        layout = KVLayout(
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            block_size=kv.shape[2],
            num_blocks=kv.shape[0] - 2,
            dtype=kv.dtype,
        )
        return attend_planned(q, k, v, kv, step.plan, layout, sizes=self.sizes, interpret=self.interpret, **options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PallasStep:
    """position: i32[tokens]; plan: for the kernels."""

    position: jax.Array
    plan: Plan
