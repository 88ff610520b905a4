"""Causal attention of ragged rows over a block-table KV store."""

from pallas_kernels.paged_attention.api import attend_planned as attend_planned
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.api import plan_step as plan_step
from pallas_kernels.paged_attention.reference import paged_attention as reference
from pallas_kernels.paged_attention.reference import write_kv as write_kv
from pallas_kernels.paged_attention.tpu import KVLayout as KVLayout
from pallas_kernels.paged_attention.tpu import Sizes as Sizes
from pallas_kernels.paged_attention.tpu import from_layout as from_layout
from pallas_kernels.paged_attention.tpu import to_layout as to_layout

__all__ = [
    "KVLayout",
    "Sizes",
    "attend_planned",
    "from_layout",
    "paged_attention",
    "plan_step",
    "reference",
    "to_layout",
    "write_kv",
]
