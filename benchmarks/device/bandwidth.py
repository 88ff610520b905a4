"""How much of the card's memory bandwidth decode reaches: Llama-3-8B's heads, bfloat16, by rows, context and blocks.

Bytes are those of the rows' keys and values, read once; the rate they are held against is what a large addition reads
and writes on the same card. 32 calls in one dispatch stand for the layers of a model; the same shape is also called
once a dispatch, a queue of them, which shows what launching costs, and looked at by the profiler, which tells what the
decode kernel takes by itself.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import report
from benchmarks.device import timing
from benchmarks.device.ahead import Ahead
from benchmarks.device.decodes import Shape, arguments, random_store, trace
from benchmarks.device.state import Found, LeftOutError, State, Step
from benchmarks.device.trace import traced

RATES = "rates of the card"
# What is asked of a card: this share of what it copies, with so many rows of so long contexts, in blocks from that on.
RATIO, LEAST_RATIO = "of the copy's rate", 0.75
ASKED, ASKED_BLOCK = (64, 8192), 64
DECODE_KERNEL = "paged_attention_decode"
# Of the memory that is free at first; what XLA takes beside the store is little.
STORE_SHARE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. launched: block sizes that are also called once a dispatch."""

    rows: tuple[int, ...] = (8, 64, 256)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    block_sizes: tuple[int, ...] = (64, 16, 256)
    launched: tuple[int, ...] = (64,)
    calls: int = 32
    heads: tuple[int, int, int] = (32, 8, 128)
    rate_bytes: int = 2**32
    repeats: int = 7


TINY = Sizes(
    rows=(2,), contexts=(64, 128), block_sizes=(16,), launched=(16,), calls=2, heads=(2, 1, 64), rate_bytes=2**20,
    repeats=1,
)  # fmt: skip


class Bench:
    """The programs, and one store at a time."""

    def __init__(self, sizes: Sizes, interpret: Any) -> None:
        self.sizes, self.interpret = sizes, interpret
        self._store: jax.Array | None = None
        self._pool_tokens: int | None = None
        shapes = [shape for size in sizes.block_sizes for shape in self._shapes(size)]
        self.programs = Ahead({shape: partial(self._trace, shape) for shape in shapes})

    def _shapes(self, block_size: int) -> list[Shape]:
        heads, kv_heads, head_dim = self.sizes.heads
        many = [
            Shape(
                rows=rows, block_size=block_size, longest=max(self.sizes.contexts), calls=self.sizes.calls,
                heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            )
            for rows in self.sizes.rows
        ]  # fmt: skip
        return [
            shape
            for each in many
            for shape in ([each, replace(each, calls=1)] if block_size in self.sizes.launched else [each])
        ]

    def _trace(self, shape: Shape) -> jax.stages.Lowered:
        return trace(shape, self.pool_tokens, self.interpret)

    @property
    def pool_tokens(self) -> int:
        """Of the store: what the largest batch needs, at most what there is memory for; the same all the time."""
        if self._pool_tokens is None:
            wanted = max(self.sizes.rows) * max(self.sizes.contexts)
            stats = jax.devices()[0].memory_stats() or {}
            _, kv_heads, head_dim = self.sizes.heads
            free = stats.get("bytes_limit", 2**31) - stats.get("bytes_in_use", 0)
            held = int(STORE_SHARE * free) // (4 * kv_heads * head_dim)
            largest = max(self.sizes.block_sizes)
            self._pool_tokens = min(wanted, held) // largest * largest
        return self._pool_tokens

    def store(self, shape: Shape) -> jax.Array:
        """A store for this block size; the one of another size is given back first."""
        layout = shape.layout(self.pool_tokens)
        if self._store is not None and (self._store.is_deleted() or self._store.shape != layout.shape):
            self._store = None
        if self._store is None:
            self._store = random_store(layout)
        return self._store

    def measure(self, rows: int, context: int, block_size: int, state: State) -> Found:
        """One batch."""
        copy = state.value(RATES, "copy GB/s")
        shape, *single = [shape for shape in self._shapes(block_size) if shape.rows == rows]
        try:
            # On the device beforehand: a table of many small blocks is megabytes.
            rest = jax.device_put(arguments(shape, context, self.pool_tokens))
        except ValueError as error:
            raise LeftOutError(f"too little memory: {error}") from error
        gigabytes = rows * context * shape.layout(block_size).token_bytes / 1e9
        k = jax.random.normal(jax.random.key(1), (rows, shape.kv_heads, shape.head_dim), jnp.bfloat16)
        carry = (
            jax.random.normal(jax.random.key(2), (rows, shape.heads, shape.head_dim), jnp.bfloat16),
            self.store(shape),
        )
        program = self.programs.get(shape)
        seconds, carry = timing.seconds_of(lambda c: program(c, k, *rest), carry, self.sizes.repeats)
        by_call = [one / shape.calls for one in seconds]
        figures = {
            "a call": report.spread([1e6 * one for one in by_call], "us"),
            "rate": timing.rates(by_call, gigabytes, "GB/s"),
            RATIO: timing.rates(by_call, gigabytes / copy, "ratio"),
        }
        carry, found = self._by_profiler(program, carry, k, rest, gigabytes, copy)
        figures |= found
        for alone in single:
            one, queue = self.programs.get(alone), range(self.sizes.calls)

            def launch(carry, one=one, queue=queue):
                for _ in queue:
                    carry = one(carry, k, *rest)
                return carry

            seconds, carry = timing.seconds_of(launch, carry, self.sizes.repeats)
            figures["a call, one a dispatch"] = report.spread([1e6 * s / shape.calls for s in seconds], "us")
        self._store = carry[1]
        limits = {}
        if (rows, context) == ASKED and block_size >= ASKED_BLOCK:
            limits[RATIO] = report.limit(figures[RATIO], LEAST_RATIO, at_least=True)
        return Found(figures=figures, limits=limits, values={"sets": int(rest[2]), "GB read by a call": gigabytes})

    def _by_profiler(self, program, carry, k, rest, gigabytes: float, copy: float) -> tuple[Any, dict]:
        """The carry, and what the decode kernel reaches by itself; nothing where the profiler sees no device."""
        after: list[Any] = []
        trace = traced(lambda: after.append(jax.block_until_ready(program(carry, k, *rest))))
        seconds = trace.seconds_in(DECODE_KERNEL) / self.sizes.calls if trace else 0.0
        if not seconds:
            return after[0], {}
        return after[0], {
            "decode kernel alone": report.spread([1e6 * seconds], "us"),
            "decode kernel alone, of the copy's rate": report.spread([gigabytes / seconds / copy], "ratio"),
            "device busy in the dispatch": report.spread([trace.busy / trace.span], "fraction"),
        }


def rates(sizes: Sizes, _: State) -> Found:
    """What the card copies and reads, and what a dispatch takes."""
    copy = timing.copy_rate(sizes.rate_bytes, sizes.repeats)
    figures = {
        "copy, read and written": copy,
        "sum, read": timing.read_rate(sizes.rate_bytes, sizes.repeats),
        "an empty dispatch": timing.dispatch_seconds(sizes.repeats),
    }
    memory = {name: int(value) for name, value in (jax.devices()[0].memory_stats() or {}).items()}
    return Found(figures=figures, values={"copy GB/s": copy["median"], "memory": memory})


def steps(args: Namespace) -> list[Step]:
    """The rates, then blocks of one size after the other; of each the batches from small to large."""
    sizes, interpret = (TINY, plgpu.InterpretGPUParams()) if args.dry_run else (Sizes(), None)
    bench = Bench(sizes, interpret)
    found = [Step(name=RATES, run=partial(rates, sizes))]
    for block_size in sizes.block_sizes:
        for rows in sizes.rows:
            for context in sizes.contexts:
                name = f"{rows} rows of {context} tokens, blocks of {block_size}"
                found.append(Step(name=name, run=partial(bench.measure, rows, context, block_size), seconds=30.0))
    return found
