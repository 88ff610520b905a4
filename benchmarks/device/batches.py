"""Small ragged batches for the GPU kernels, and what they must come to: the float64 reference on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.reference import paged_attention as reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """rows: (context, new tokens) each; fp8: the store has 8 bits, and scales; the others as in `paged_attention`."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    fp8: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    span: int | None = None

    @property
    def single(self) -> bool:
        """Every row has one new token, and that is promised to the kernels."""
        return all(count == 1 for _, count in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A case's arrays, on the host.

    Attributes:
      kv: [2, kv_heads, num_blocks + 2, block_size, head_dim], with NaN in all that nothing may read.
      step: table, slot, q_start, context_len and num_rows, as `paged_attention` takes them.
      owned: blocks of the rows.
    """

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv: np.ndarray
    step: tuple[np.ndarray, ...]
    sinks: np.ndarray | None
    scales: tuple[np.ndarray, np.ndarray] | None
    owned: frozenset[int]


def make_batch(case: Case) -> Batch:
    """Random numbers, blocks and slots in random order."""
    rng = np.random.default_rng(0)
    size, heads = case.block_size, case.kv_heads
    dtype = jnp.dtype(case.dtype)
    blocks_of = [-(-context // size) for context, _ in case.rows]
    num_blocks = sum(blocks_of) + 3
    order = rng.permutation(num_blocks)
    table = np.full((len(case.rows) + 1, max(blocks_of)), num_blocks, np.int32)
    slot = rng.permutation(len(case.rows)).astype(np.int32)
    store = jnp.dtype(jnp.float8_e4m3fn if case.fp8 else dtype)
    kv = rng.standard_normal((2, heads, num_blocks + 2, size, case.head_dim), np.float32).astype(store)
    readable = np.zeros((num_blocks + 2, size), bool)
    taken = 0
    for row, (context, count) in enumerate(case.rows):
        own = order[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        table[slot[row], : len(own)] = own
        before = np.arange(context - count)
        readable[own[before // size], before % size] = True
    kv[:, :, ~readable] = np.nan
    counts = [count for _, count in case.rows]
    tokens = sum(counts) if case.single else sum(counts) + 1  # one of padding

    def numbers(heads: int) -> np.ndarray:
        return rng.standard_normal((tokens, heads, case.head_dim), np.float32).astype(dtype)

    scales = tuple(np.linspace(low, 2 * low, heads, dtype=np.float32) for low in (0.02, 0.03))
    return Batch(
        case=case,
        q=numbers(heads * case.group),
        k=numbers(heads),
        v=numbers(heads),
        kv=kv,
        step=(
            table,
            slot,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array([context for context, _ in case.rows], np.int32),
            np.int32(len(case.rows)),
        ),
        sinks=2 * rng.standard_normal(heads * case.group, np.float32) if case.sinks else None,
        scales=scales if case.fp8 else None,
        owned=frozenset(order[:taken].tolist()),
    )


def layout_of(batch: Batch) -> gpu.GpuLayout:
    """The layout of its store."""
    _, heads, blocks, size, width = batch.kv.shape
    return gpu.GpuLayout(
        num_kv_heads=heads, head_dim=width, block_size=size, num_blocks=blocks - 2, dtype=batch.kv.dtype
    )


def trace(batch: Batch, interpret: Any) -> jax.stages.Lowered:
    """The kernels for this batch, traced, the store donated; on a CPU with few programs, so that rings go round."""
    case, layout = batch.case, layout_of(batch)
    few = {"multiprocessors": 2, "decode_programs": 1} if interpret else {}
    call = jax.jit(
        partial(
            gpu.paged_attention,
            window=case.window,
            soft_cap=case.soft_cap,
            single_token_rows=case.single,
            sizes=gpu.GpuSizes(span=case.span, **few),
            interpret=interpret,
        ),
        donate_argnums=3,
    )
    store = jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    return call.lower(batch.q, batch.k, batch.v, store, *batch.step, **_optional(batch))


def answer(batch: Batch, program: jax.stages.Compiled) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, and the store in its plain form."""
    layout = layout_of(batch)
    store = gpu.to_layout(jnp.asarray(batch.kv), layout)
    out, kv = program(batch.q, batch.k, batch.v, store, *batch.step, **_optional(batch))
    return np.asarray(out), np.asarray(gpu.from_layout(kv, layout))


def _optional(batch: Batch) -> dict[str, Any]:
    scales = {} if batch.scales is None else dict(zip(("k_scales", "v_scales"), batch.scales, strict=True))
    return scales if batch.sinks is None else scales | {"sinks": batch.sinks}


def differences(batch: Batch, out: np.ndarray, kv: np.ndarray) -> tuple[float, float, bool]:
    """What is wrong with an answer.

    Returns:
      The largest error of the outputs, relative to the largest of them; that of the store's new cells, in steps of its
      dtype; whether blocks of nobody are as they were.
    """
    case = batch.case
    k, v = (rounded(x, batch, which) for which, x in enumerate((batch.k, batch.v)))
    _, written = reference(batch.q, k, v, batch.kv, *batch.step)
    owned = sorted(batch.owned)
    new, should = (x[:, :, owned].astype(np.float32) for x in (kv, written))
    is_known = ~np.isnan(should)
    step = np.spacing(np.abs(should[is_known]).astype(batch.kv.dtype)).astype(np.float32)
    off = np.abs(new[is_known] - should[is_known]) / step
    factors = np.ones((2, case.kv_heads)) if batch.scales is None else np.stack(batch.scales)
    # Outputs are those of the store that was found: what was rounded otherwise there has been looked at by itself.
    found = kv.astype(np.float64) * factors[:, :, None, None, None]
    cells = _cells_of_tokens(batch, found)
    options = {"window": case.window, "soft_cap": case.soft_cap, "sinks": batch.sinks}
    expected, _ = reference(batch.q.astype(np.float64), cells[0], cells[1], found, *batch.step, **options)
    error = np.abs(out.astype(np.float64) - expected).max() / np.abs(expected).max()
    others = sorted(set(range(batch.kv.shape[2] - 2)) - batch.owned)
    is_left = kv[:, :, others].tobytes() == batch.kv[:, :, others].tobytes()
    # A NaN is an error, and no number is larger than it.
    return float(np.nan_to_num(error, nan=np.inf)), float(np.nan_to_num(off, nan=np.inf).max()), is_left


def rounded(x: np.ndarray, batch: Batch, which: int) -> np.ndarray:
    """Keys (0) or values (1) as the store holds them."""
    if batch.scales is None:
        return x
    bound = float(jnp.finfo(batch.kv.dtype).max)
    return (x.astype(np.float32) / batch.scales[which][:, None]).clip(-bound, bound).astype(batch.kv.dtype)


def _cells_of_tokens(batch: Batch, kv: np.ndarray) -> np.ndarray:
    """[2, tokens, kv_heads, head_dim] of the batch's tokens, from a store that holds them; zeros for padding."""
    table, slot, q_start, context_len, _ = batch.step
    cells = np.zeros((2, *batch.k.shape))
    for row, (_, count) in enumerate(batch.case.rows):
        for index in range(count):
            position = context_len[row] - count + index
            block = table[slot[row], position // batch.case.block_size]
            cells[:, q_start[row] + index] = kv[:, :, block, position % batch.case.block_size]
    return cells
