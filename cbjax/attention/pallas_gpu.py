"""Attention by the Pallas kernels for GPUs, which know nothing of this package."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from cbjax.attention.batch import token_places
from cbjax.attention.implementation import GroupSizes
from cbjax.attention.spec import LayoutName
from pallas_kernels.paged_attention.gpu import GpuLayout, GpuPlan, GpuSizes, attend_planned, plan_step


@dataclass(frozen=True, slots=True)
class PallasGpuAttention:
    """`pallas_kernels.paged_attention.gpu`, on GPUs of compute capability 9.0.

    Attributes:
        sizes: of the kernels' grids.
        interpret: for the kernels; anywhere else than on such a GPU they can only be interpreted.
    """

    sizes: GpuSizes = dataclasses.field(default_factory=GpuSizes)
    interpret: Any = None
    name: str = "pallas"
    layout: LayoutName = "gpu"

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
        plan = plan_step(
            *rows,
            num_tokens=num_tokens,
            block_size=block_size,
            kv_heads=group.fewest_kv_heads,
            group=group.most_queries,
            windows=(group.window,),
            single_token_rows=single_token_rows,
            sizes=self.sizes,
        )
        return PallasGpuStep(position=places.position, plan=plan)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, step: Any, **options: Any) -> Any:
        layout = GpuLayout(
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            block_size=kv.shape[2],
            num_blocks=kv.shape[0] - 2,
            dtype=kv.dtype,
        )
        return attend_planned(q, k, v, kv, step.plan, layout, sizes=self.sizes, interpret=self.interpret, **options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PallasGpuStep:
    """position: i32[tokens]; plan: for the kernels."""

    position: jax.Array
    plan: GpuPlan
