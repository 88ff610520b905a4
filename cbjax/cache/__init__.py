"""The block-table KV store on the device, copies of whole blocks, and the tier of them in host memory."""

from cbjax.cache.block_copies import CALLS_IN_FLIGHT as CALLS_IN_FLIGHT
from cbjax.cache.block_copies import Block as Block
from cbjax.cache.block_copies import blocks_per_call as blocks_per_call
from cbjax.cache.block_copies import calls as calls
from cbjax.cache.block_copies import lower_block_program as lower_block_program
from cbjax.cache.block_copies import reads_first as reads_first
from cbjax.cache.host_tier import HostTier as HostTier
from cbjax.cache.paged import PagedAttentionCache as PagedAttentionCache
from cbjax.cache.paged import layout_factor as layout_factor
