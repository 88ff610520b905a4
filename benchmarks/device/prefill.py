"""How much of the card's matrix rate prefill reaches: Llama-3-8B's heads, bfloat16, rows of 2k and 8k new tokens.

Operations are those of the scores that are seen and of their values, 4 x heads x head_dim for each token and position
before it; what masked tiles cost beside them is the kernel's own. The rate they are held against is that of a large
product of bfloat16 matrices on the same card.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import report
from benchmarks.device import timing
from benchmarks.device.ahead import Ahead
from benchmarks.device.decodes import random_store
from benchmarks.device.state import Found, State, Step
from benchmarks.device.trace import traced
from pallas_kernels.paged_attention import gpu

RATE = "rate of the card"
# What is asked of a card: this share of its products' rate, for so many new tokens.
RATIO, LEAST_RATIO, ASKED = "of the product's rate", 0.5, 8192
VARLEN_KERNEL = "paged_attention_varlen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """rows of `context` tokens each, of which the last `new` are computed."""

    rows: int
    new: int
    context: int
    block_size: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        what = f"{self.new} new tokens of {self.context}" if self.new < self.context else f"{self.new} tokens"
        return f"{self.rows} rows of {what}, blocks of {self.block_size}"

    @property
    def flops(self) -> float:
        """Of the pairs of a token and what it sees."""
        pairs = self.rows * (self.new * self.context - self.new * (self.new - 1) // 2)
        return 4.0 * pairs * self.heads * self.head_dim

    @property
    def layout(self) -> gpu.GpuLayout:
        """Of a store that holds the rows."""
        return gpu.GpuLayout(
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=self.rows * self.context // self.block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured; calls: in one dispatch."""

    cases: tuple[Prefill, ...] = (
        Prefill(rows=1, new=2048, context=2048),
        Prefill(rows=4, new=2048, context=2048),
        Prefill(rows=1, new=8192, context=8192),
        Prefill(rows=1, new=512, context=8192),
        Prefill(rows=1, new=8192, context=8192, block_size=16),
        Prefill(rows=1, new=8192, context=8192, block_size=256),
    )
    calls: int = 8
    product: int = 8192
    repeats: int = 7


TINY = Sizes(
    cases=(Prefill(rows=1, new=40, context=64, block_size=16, heads=2, kv_heads=1, head_dim=64),), calls=1, product=64,
    repeats=1,
)  # fmt: skip


def trace(case: Prefill, calls: int, interpret: Any) -> jax.stages.Lowered:
    """`calls` calls, one after the other: (q, kv), k, table -> (q, kv), the first donated."""
    layout, rows, tokens = case.layout, case.rows, case.rows * case.new
    sizes = gpu.GpuSizes(multiprocessors=2, decode_programs=1) if interpret else gpu.GpuSizes()

    def run(carry, k, table):
        plan = gpu.plan_step(
            table, jnp.arange(rows, dtype=jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32) * case.new,
            jnp.full(rows, case.context, jnp.int32), jnp.int32(rows), num_tokens=tokens,
            block_size=layout.block_size, kv_heads=case.kv_heads, group=case.heads // case.kv_heads, sizes=sizes,
        )  # fmt: skip

        def call(_, carry):
            q, kv = carry
            return gpu.attend_planned(q, k, k, kv, plan, layout, sizes=sizes, interpret=interpret)

        return jax.lax.fori_loop(0, calls, call, carry)

    q, k = (jax.ShapeDtypeStruct((tokens, heads, case.head_dim), jnp.bfloat16) for heads in (case.heads, case.kv_heads))
    table = jax.ShapeDtypeStruct((rows + 1, case.context // case.block_size), jnp.int32)
    store = jax.ShapeDtypeStruct(layout.shape, layout.dtype)
    return jax.jit(run, donate_argnums=0).lower((q, store), k, table)


def measure(case: Prefill, sizes: Sizes, programs: Ahead[Prefill], state: State) -> Found:
    """One batch."""
    product = state.value(RATE, "product TFLOP/s")
    program, layout = programs.get(case), case.layout
    table = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int32).reshape(case.rows, -1)
    table = jax.device_put(np.concatenate([table, table[:1]]))
    tokens = case.rows * case.new
    q, k = (
        jax.random.normal(jax.random.key(heads), (tokens, heads, case.head_dim), jnp.bfloat16)
        for heads in (case.heads, case.kv_heads)
    )
    seconds, carry = timing.seconds_of(lambda c: program(c, k, table), (q, random_store(layout)), sizes.repeats)
    by_call, teraflops = [one / sizes.calls for one in seconds], case.flops / 1e12
    figures = {
        "a call": report.spread([1e6 * one for one in by_call], "us"),
        "rate": timing.rates(by_call, teraflops, "TFLOP/s"),
        RATIO: timing.rates(by_call, teraflops / product, "ratio"),
    }
    found = traced(lambda: jax.block_until_ready(program(carry, k, table)))
    alone = found.seconds_in(VARLEN_KERNEL) / sizes.calls if found else 0.0
    if alone:
        figures["varlen kernel alone"] = report.spread([1e6 * alone], "us")
        figures["varlen kernel alone, of the product's rate"] = report.spread([teraflops / alone / product], "ratio")
    limits = {}
    if case.new == ASKED:
        limits[RATIO] = report.limit(figures[RATIO], LEAST_RATIO, at_least=True)
    return Found(figures=figures, limits=limits, values={"TFLOP of a call": teraflops})


def rate(sizes: Sizes, _: State) -> Found:
    """What the card multiplies."""
    product = timing.product_rate(sizes.product, sizes.repeats)
    return Found(figures={"product of matrices": product}, values={"product TFLOP/s": product["median"]})


def steps(args: Namespace) -> list[Step]:
    """The rate, then each batch."""
    sizes, interpret = (TINY, plgpu.InterpretGPUParams()) if args.dry_run else (Sizes(), None)
    programs = Ahead({case: partial(trace, case, sizes.calls, interpret) for case in sizes.cases})
    cases = [Step(name=str(case), run=partial(measure, case, sizes, programs), seconds=25.0) for case in sizes.cases]
    return [Step(name=RATE, run=partial(rate, sizes)), *cases]
