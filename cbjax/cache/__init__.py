"""The block-table KV store on the device."""

from cbjax.cache.paged import PagedAttentionCache as PagedAttentionCache
from cbjax.cache.paged import store_specs as store_specs
