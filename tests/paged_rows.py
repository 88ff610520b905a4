"""Ragged steps for the tests of paged attention: who has how many tokens, packed into the kernel's arrays."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from cbjax.attention import KVSpec, LayerGroups, LayerSpec, StoreSpec, layer_groups, paged_attention, store_spec

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
kernel = jax.jit(paged_attention, static_argnames=("scale", "window", "soft_cap", "single_token_rows"))
MIXED = [(0, 1, 1), (1, 1, 128), (2, 70, 70), (3, 1, 129), (4, 65, 200), (5, 2, 131), (6, 1, 300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch row: `count` new tokens that end a context of `context` tokens of the sequence in `slot`."""

    slot: int
    count: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Kernel arguments of one step after q, k, v and kv; `names` order is the kernel's."""

    table: np.ndarray
    slot: np.ndarray
    q_start: np.ndarray
    context_len: np.ndarray
    num_rows: np.int32

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return (self.table, self.slot, self.q_start, self.context_len, self.num_rows)


def make_table(spec: KVSpec, lengths: list[int], *, seed: int = 0, width: int | None = None) -> np.ndarray:
    """Block table of sequences of the given lengths in shuffled blocks, unused entries and the trash slot outside."""
    order = iter(np.random.default_rng(seed).permutation(spec.num_blocks))
    width = width or max(-(-length // spec.block_size) for length in lengths)
    table = np.full((len(lengths) + 1, width), spec.num_blocks, np.int32)
    for slot, length in enumerate(lengths):
        for column in range(-(-length // spec.block_size)):
            table[slot, column] = next(order)
    return table


def pack(table: np.ndarray, rows: list[Row], *, max_rows: int, single_token_rows: bool = False) -> Step:
    """Pads the rows to `max_rows`."""
    trash = len(table) - 1
    counts = [row.count for row in rows]
    padding = max_rows - len(rows)
    total = sum(counts)
    q_start = np.array([0, *np.cumsum(counts), *[total] * padding], np.int32)
    if single_token_rows:
        q_start = np.arange(max_rows + 1, dtype=np.int32)
    return Step(
        table=table,
        slot=np.array([row.slot for row in rows] + [trash] * padding, np.int32),
        q_start=q_start,
        context_len=np.array([row.context for row in rows] + [0] * padding, np.int32),
        num_rows=np.int32(len(rows)),
    )


def make_spec(block_size: int, blocks_of_128: int = 12, dtype: jax.typing.DTypeLike = jnp.float32) -> KVSpec:
    num_blocks = max(12, blocks_of_128 * 128 // block_size)
    return KVSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, num_blocks=num_blocks, dtype=dtype)


def one_group(num_layers: int, spec: KVSpec, window: int | None = None) -> LayerGroups:
    """Layers that all see as far back."""
    layer = LayerSpec(
        num_heads=spec.num_kv_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, window=window
    )
    return layer_groups([layer] * num_layers)


def one_store(num_layers: int, spec: KVSpec) -> StoreSpec:
    """A store of as many such arrays, of layers that see their whole context."""
    groups = one_group(num_layers, spec)
    return store_spec(groups, num_blocks=spec.num_blocks, block_size=spec.block_size, dtype=spec.dtype)


def make_inputs(spec: KVSpec, num_tokens: int, seed: int = 0, heads: int = HEADS) -> tuple[np.ndarray, ...]:
    """q, k, v and a store full of stale values."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_tokens, heads, spec.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, num_tokens, spec.num_kv_heads, spec.head_dim), dtype=np.float32)
    kv = rng.standard_normal(spec.shape, dtype=np.float32).astype(spec.dtype)
    return q, k, v, kv


def real_blocks(kv: np.ndarray) -> np.ndarray:
    """The store without the block that padding writes."""
    return np.asarray(kv)[:, :, :-1]


def mixed_step(spec: KVSpec) -> Step:
    """Decode rows and prefill chunks, whole and in part, interleaved."""
    rows = [Row(slot=slot, count=count, context=context) for slot, count, context in MIXED]
    table = make_table(spec, [row.context for row in rows])
    return pack(table, rows, max_rows=9)
