"""The `attend` contract, the layout of the KV store and the attention implementations."""

from cbjax.attention.batch import PagedBatch as PagedBatch
from cbjax.attention.batch import prepare_batch as prepare_batch
from cbjax.attention.contract import Attend as Attend
from cbjax.attention.contract import LayerSpec as LayerSpec
from cbjax.attention.dense import DenseAttend as DenseAttend
from cbjax.attention.groups import LayerGroups as LayerGroups
from cbjax.attention.groups import layer_groups as layer_groups
from cbjax.attention.implementation import XLA as XLA
from cbjax.attention.implementation import Attention as Attention
from cbjax.attention.implementation import EagerAttention as EagerAttention
from cbjax.attention.implementation import XlaAttention as XlaAttention
from cbjax.attention.paged import PagedAttend as PagedAttend
from cbjax.attention.recording import record_layers as record_layers
from cbjax.attention.selection import AttentionChoice as AttentionChoice
from cbjax.attention.selection import Place as Place
from cbjax.attention.selection import choose_attention as choose_attention
from cbjax.attention.spec import KVSpec as KVSpec
from cbjax.attention.store import StoreSpec as StoreSpec
from cbjax.attention.store import store_spec as store_spec
from cbjax.attention.xla import paged_attention as paged_attention
