"""Seconds of calls, and the two rates of the card that others are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report

# Products in one dispatch, and copies in one queue, so that launching them is not what is measured.
TOGETHER = 16


def seconds_of(call: Callable[[Any], Any], carry: Any, repeats: int) -> tuple[list[float], Any]:
    """Seconds of each of `repeats` calls, each waited for, after one that is not counted; also the last result.

    `call` takes what it gave before, so that it may be one that donates its argument.
    """
    carry = jax.block_until_ready(call(carry))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(call(carry))
        seconds.append(time.perf_counter() - start)
    return seconds, carry


def rates(seconds: list[float], amount: float, unit: str) -> report.Figure:
    """`amount` per second, each time."""
    return report.spread([amount / one for one in seconds], unit)


def copy_rate(num_bytes: int, repeats: int) -> report.Figure:
    """GB/s that a large addition reads and writes, both counted."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)

    @jax.jit
    def copied(x: jax.Array) -> jax.Array:
        return x + jnp.uint32(1)

    def call(x: jax.Array) -> jax.Array:
        for _ in range(TOGETHER):
            x = copied(x)
        return x

    seconds, _ = seconds_of(call, x, repeats)
    return rates(seconds, 2 * TOGETHER * x.nbytes / 1e9, "GB/s")


def read_rate(num_bytes: int, repeats: int) -> report.Figure:
    """GB/s that a large sum reads."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)

    @jax.jit
    def summed(x: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.sum(x) + before

    def call(total: jax.Array) -> jax.Array:
        for _ in range(TOGETHER):
            total = summed(x, total)
        return total

    seconds, _ = seconds_of(call, jnp.uint32(0), repeats)
    return rates(seconds, TOGETHER * x.nbytes / 1e9, "GB/s")


def product_rate(size: int, repeats: int) -> report.Figure:
    """TFLOP/s of a product of two random square matrices of bfloat16."""
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (size, size), jnp.bfloat16)
    b = (jax.random.normal(keys[1], (size, size), jnp.float32) * size**-0.5).astype(jnp.bfloat16)

    @partial(jax.jit, donate_argnums=0)
    def multiplied(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, TOGETHER, lambda _, a: a @ b, a)

    seconds, _ = seconds_of(lambda a: multiplied(a, b), a, repeats)
    return rates(seconds, 2 * TOGETHER * size**3 / 1e12, "TFLOP/s")


def dispatch_seconds(repeats: int) -> report.Figure:
    """Microseconds from one dispatch to the next of a program that does next to nothing, a hundred in the queue."""
    step = jax.jit(lambda x: x + 1)

    def call(x: jax.Array) -> jax.Array:
        for _ in range(100):
            x = step(x)
        return x

    seconds, _ = seconds_of(call, jnp.float32(0), repeats)
    return report.spread([1e4 * one for one in seconds], "us")
