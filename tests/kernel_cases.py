"""Ragged batches for attention kernels, and the ways that each is computed: one suite for all backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from cbjax.attention import paged_attention as xla_attention
from pallas_kernels.paged_attention import KVLayout, Sizes, from_layout, gpu, paged_attention, reference, to_layout

CHUNK = 256
# Largest error, relative to the largest output: of the sums, and of a store's rounding, which the oracle shares.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch. rows: (context, new tokens) each; `options` are the function's own."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    window: int | None = None
    options: dict = field(default_factory=dict)
    sinks: bool = False
    seed: int = 0
    padding_rows: int = 1

    @property
    def store_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def single(self) -> bool:
        return all(count <= 1 for _, count in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A case's arrays. kv: the plain form, with NaN (where the dtype has it) in all that nothing may read."""

    case: Case
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    kv: np.ndarray
    table: np.ndarray
    slot: np.ndarray
    q_start: np.ndarray
    context_len: np.ndarray
    sinks: np.ndarray | None
    scales: tuple[np.ndarray, np.ndarray] | None

    @property
    def step(self) -> tuple[np.ndarray, ...]:
        return (self.table, self.slot, self.q_start, self.context_len, np.int32(len(self.case.rows)))


def make_batch(case: Case) -> Batch:
    """Blocks are shuffled, rows lie in shuffled slots, and entries of blocks that left the window name the trash."""
    rng = np.random.default_rng(case.seed)
    size, store = case.block_size, jnp.dtype(case.store_dtype)
    rows = [*case.rows, *[(0, 0)] * case.padding_rows]
    blocks_of = [-(-context // size) for context, _ in rows]
    num_blocks = sum(blocks_of) + 3
    order = rng.permutation(num_blocks)
    # As wide as the longest row, so that a look beyond a table's end is one beyond the array.
    table = np.full((len(rows) + 1, max(128, max(blocks_of))), num_blocks, np.int32)
    slot = rng.permutation(len(rows)).astype(np.int32)
    plain = (2, case.kv_heads, num_blocks + 2, size, case.head_dim)
    kv = _numbers(rng, plain, store)
    readable = np.zeros((num_blocks + 2, size), bool)
    taken = 0
    for row, (context, count) in enumerate(rows):
        own = order[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        table[slot[row], : len(own)] = own
        for position in range(context - count):
            readable[own[position // size], position % size] = True
        if case.window is not None:
            left = max(context - count - case.window + 1, 0) // size
            table[slot[row], :left] = num_blocks
            readable[own[:left]] = False
    if not jnp.issubdtype(store, jnp.integer):
        kv[:, :, ~readable] = np.nan
    counts = np.array([count for _, count in rows])
    tokens = int(counts.sum()) + 1  # one of padding
    if case.single:
        tokens, q_start = len(rows), np.arange(len(rows) + 1, dtype=np.int32)
    else:
        q_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    k, v = (_numbers(rng, (tokens, case.kv_heads, case.head_dim), jnp.dtype(case.dtype)) for _ in range(2))
    scales = None
    if store.itemsize == 1:
        scales = tuple(np.linspace(low, 2 * low, case.kv_heads, dtype=np.float32) for low in (0.02, 0.03))
    return Batch(
        case=case,
        q=_numbers(rng, (tokens, case.kv_heads * case.group, case.head_dim), jnp.dtype(case.dtype)),
        k=k,
        v=v,
        kv=kv,
        table=table,
        slot=slot,
        q_start=q_start,
        context_len=np.array([context for context, _ in rows], np.int32),
        sinks=2 * rng.standard_normal(case.kv_heads * case.group, np.float32) if case.sinks else None,
        scales=scales,
    )


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    normal = rng.standard_normal(shape, np.float32)
    return (30 * normal).clip(-127, 127).round().astype(dtype) if dtype == np.int8 else normal.astype(dtype)


def _layout(batch: Batch) -> KVLayout:
    _, heads, blocks, size, width = batch.kv.shape
    return KVLayout(num_kv_heads=heads, head_dim=width, block_size=size, num_blocks=blocks - 2, dtype=batch.kv.dtype)


def on_tpu(mode: str, batch: Batch, **compiler_options) -> tuple[jax.Array, jax.Array]:
    """The TPU kernels, interpreted. eager: copies are done at once, and races are found; on_wait: as late as may be."""
    interpret = pltpu.InterpretParams(
        dma_execution_mode=mode, detect_races=mode == "eager", uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    layout = _layout(batch)
    scales = {} if batch.scales is None else dict(zip(("k_scales", "v_scales"), batch.scales, strict=True))
    call = jax.jit(
        partial(
            paged_attention,
            backend="tpu",
            window=batch.case.window,
            single_token_rows=batch.case.single,
            sizes=Sizes(chunk=CHUNK),
            interpret=interpret,
            **batch.case.options,
        ),
        compiler_options=compiler_options,
    )
    store = to_layout(jnp.asarray(batch.kv), layout)
    out, kv = call(batch.q, batch.k, batch.v, store, *batch.step, sinks=batch.sinks, **scales)
    return out, from_layout(kv, layout)


def on_gpu(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The GPU kernels, interpreted, with races looked for and shared memory full of NaN."""
    _, heads, blocks, size, width = batch.kv.shape
    layout = gpu.GpuLayout(
        num_kv_heads=heads, head_dim=width, block_size=size, num_blocks=blocks - 2, dtype=batch.kv.dtype
    )
    scales = {} if batch.scales is None else dict(zip(("k_scales", "v_scales"), batch.scales, strict=True))
    call = jax.jit(
        partial(
            paged_attention,
            backend="gpu",
            window=batch.case.window,
            single_token_rows=batch.case.single,
            # Few programs, so that each has several items and its ring goes round.
            sizes=gpu.GpuSizes(multiprocessors=2, decode_programs=1),
            interpret=plgpu.InterpretGPUParams(detect_races=True),
            **batch.case.options,
        )
    )
    store = gpu.to_layout(jnp.asarray(batch.kv), layout)
    # NumPy, which multiplies for the interpreter, may complain of keys that are NaN; they are masked afterwards.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        found = call(batch.q, batch.k, batch.v, store, *batch.step, sinks=batch.sinks, **scales)
        out, kv = jax.block_until_ready(found)
    return out, gpu.from_layout(kv, layout)


def on_xla(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The portable implementation."""
    call = jax.jit(
        partial(xla_attention, window=batch.case.window, single_token_rows=batch.case.single, **batch.case.options)
    )
    return call(batch.q, batch.k, batch.v, batch.kv, *batch.step, sinks=batch.sinks)


BACKENDS: dict[str, Callable[[Batch], tuple[jax.Array, jax.Array]]] = {
    "xla": on_xla,
    "tpu, eager": partial(on_tpu, "eager"),
    "tpu, on_wait": partial(on_tpu, "on_wait"),
    "gpu": on_gpu,
}


def computable(backend: str, case: Case) -> Case:
    """The case in a dtype that the backend computes with: the GPU kernels have no float32."""
    return replace(case, dtype="float16") if backend == "gpu" and case.dtype == "float32" else case


def check(backend: str, case: Case) -> None:
    """Compares a backend with the float64 reference: outputs within `TOLERANCE`, the store to the byte.

    Every cell of a context holds what it must, and every block of nobody is as it was. What lies behind a context in
    its last block belongs to the row, which may write there.
    """
    case = computable(backend, case)
    batch = make_batch(case)
    out, kv = (np.asarray(array) for array in BACKENDS[backend](batch))
    expected, expected_kv = oracle(batch, kv)
    assert out.dtype == case.dtype
    error = np.abs(out.astype(np.float64) - expected).max() / (np.abs(expected).max() or 1.0)
    assert error < TOLERANCE[case.dtype], f"{backend}: error {error:.1e}"
    size, owned = case.block_size, set()
    for row, (context, count) in enumerate(case.rows):
        blocks = batch.table[batch.slot[row]]
        first = 0 if case.window is None else max(context - count - case.window + 1, 0)
        owned |= set(blocks[: -(-context // size)].tolist())
        for position in range(first, context):
            cell = (slice(None), slice(None), blocks[position // size], position % size)
            _same(kv[cell], expected_kv[cell], batch)
    others = sorted(set(range(batch.kv.shape[2] - 1)) - owned)
    assert kv[:, :, others].tobytes() == batch.kv[:, :, others].tobytes()


def _same(found: np.ndarray, expected: np.ndarray, batch: Batch) -> None:
    if batch.scales is None:
        assert found.tobytes() == expected.astype(found.dtype).tobytes()
    else:  # a quotient that lies between two numbers of the store may go to either
        step = 1.0 if found.dtype == np.int8 else 0.125 * np.abs(expected.astype(np.float32)).max()
        assert np.abs(found.astype(np.float32) - expected.astype(np.float32)).max() <= step


def oracle(batch: Batch, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f64 outputs, and the store in its own dtype.

    With scales the outputs are those of the store that was `found`: what was rounded otherwise than here (see `_same`)
    is looked at by itself.
    """
    case, store = batch.case, batch.kv.dtype
    options = dict(window=case.window, sinks=batch.sinks, **case.options)
    k, v = batch.k, batch.v
    if batch.scales is None:
        _, written = reference(batch.q, k.astype(store), v.astype(store), batch.kv, *batch.step, **options)
        real = written.astype(np.float64)
    else:
        k, v = (_quantized(x, scale, store) for x, scale in zip((k, v), batch.scales, strict=True))
        _, written = reference(batch.q, k, v, batch.kv, *batch.step, **options)
        real = found.astype(np.float64) * np.stack(batch.scales).astype(np.float64)[:, :, None, None, None]
    # The new tokens are in `real` already: they are written once more as they are there.
    new = _cells(real, batch)
    out, _ = reference(batch.q.astype(np.float64), *new, real, *batch.step, **options)
    return out, written


def _quantized(x: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    scaled = x.astype(np.float32) / scales[:, None]
    bound = float(jnp.iinfo(dtype).max if dtype == np.int8 else jnp.finfo(dtype).max)
    scaled = scaled.clip(-bound, bound)
    return (scaled.round() if dtype == np.int8 else scaled).astype(dtype)


def _cells(kv: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the batch's tokens, from a store that holds them."""
    new = np.zeros((2, *batch.k.shape))
    for row, (context, count) in enumerate(batch.case.rows):
        for index in range(count):
            position = context - count + index
            block = batch.table[batch.slot[row], position // batch.case.block_size]
            new[:, batch.q_start[row] + index] = kv[:, :, block, position % batch.case.block_size]
    return new[0], new[1]
