"""Paged attention for Hopper GPUs, in Pallas on Mosaic GPU."""

from pallas_kernels.paged_attention.gpu.api import attend_planned as attend_planned
from pallas_kernels.paged_attention.gpu.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.gpu.api import plan_step as plan_step
from pallas_kernels.paged_attention.gpu.attend import GpuSizes as GpuSizes
from pallas_kernels.paged_attention.gpu.layout import GpuLayout as GpuLayout
from pallas_kernels.paged_attention.gpu.layout import from_layout as from_layout
from pallas_kernels.paged_attention.gpu.layout import to_layout as to_layout
from pallas_kernels.paged_attention.gpu.plan import GpuPlan as GpuPlan
