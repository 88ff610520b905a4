"""Causal attention of ragged rows over a block-table KV store."""

from pallas_kernels.paged_attention.reference import paged_attention as reference
from pallas_kernels.paged_attention.reference import write_kv as write_kv

__all__ = ["reference", "write_kv"]
