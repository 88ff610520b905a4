"""What a program of a persistent grid does: some of the pairs of an item and a kv head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def each_work(
    count, heads: int, programs: int, body: Callable[[Any, Any, Any, Any], Any], *, backwards: bool = False
) -> None:
    """Runs the works of this program in their order; programs that begin together have works beside each other.

    Args:
      count: i32 scalar, items.
      heads: kv heads.
      programs: of the grid, whose axis is "program".
      body: of (work's number, item, head, tiles before), returns the tiles so far.
      backwards: from the last item to the first.
    """
    program, works = lax.axis_index("program"), count * heads

    def run(number, done):
        work = program + number * programs
        work = works - 1 - work if backwards else work
        return body(number, lax.div(work, heads), lax.rem(work, heads), done)

    turns = lax.div(works - program + (programs - 1), programs)
    lax.fori_loop(0, jnp.where(works > program, turns, 0), run, jnp.int32(0))
