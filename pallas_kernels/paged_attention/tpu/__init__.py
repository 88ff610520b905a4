"""Paged attention for TPUs, in Pallas."""

from pallas_kernels.paged_attention.tpu.attend import Sizes as Sizes
from pallas_kernels.paged_attention.tpu.layout import KVLayout as KVLayout
from pallas_kernels.paged_attention.tpu.layout import from_layout as from_layout
from pallas_kernels.paged_attention.tpu.layout import to_layout as to_layout
from pallas_kernels.paged_attention.tpu.plan import Plan as Plan
