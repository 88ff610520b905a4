"""Whether the GPU kernels are right on this card: every feature, on small batches, against the float64 reference."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import report
from benchmarks.device.ahead import Ahead
from benchmarks.device.batches import Case, answer, differences, make_batch, trace
from benchmarks.device.state import Found, State, Step

BOUND = 2e-2
# A moving answer is a race: so often the same call must give the same bits.
RUNS = 3

DECODE = ((1, 1), (17, 1), (64, 1), (300, 1), (700, 1))
MIXED = ((300, 1), (40, 40), (200, 70), (65, 2), (130, 1))
TINY_ROWS = ((70, 1), (20, 5))


def cases() -> dict[str, Case]:
    """By name, the plain ones first, so that a fault is seen in the simplest case that has it."""
    decode, mixed = Case(rows=DECODE), Case(rows=MIXED)
    found = {"decode": decode, "mixed": mixed}
    for head_dim in (64, 128, 256):
        for block_size in (16, 64, 256):
            sizes = {"head_dim": head_dim, "block_size": block_size}
            found[f"mixed, head_dim {head_dim}, blocks of {block_size}"] = replace(mixed, **sizes)
    for group in (1, 8):
        found[f"mixed, {group} query heads to a kv head"] = replace(mixed, group=group)
    features: dict[str, dict[str, Any]] = {
        "window 100": {"window": 100},
        "soft cap": {"soft_cap": 5.0},
        "sinks": {"sinks": True},
        "fp8 store": {"fp8": True},
        "float16": {"dtype": "float16"},
        "span 128": {"span": 128},
        "all of it": {"window": 100, "soft_cap": 5.0, "sinks": True, "fp8": True, "block_size": 16, "head_dim": 64},
    }
    for name, changes in features.items():
        found |= {f"decode, {name}": replace(decode, **changes), f"mixed, {name}": replace(mixed, **changes)}
    return found


def tiny_cases() -> dict[str, Case]:
    """The least that goes through every kernel."""
    tiny = Case(rows=TINY_ROWS, kv_heads=1, group=2, head_dim=64, block_size=16)
    return {"mixed": tiny, "mixed, all of it": replace(tiny, window=30, soft_cap=5.0, sinks=True, fp8=True)}


def check(name: str, case: Case, programs: Ahead[str], runs: int, _: State) -> Found:
    """One case, several times."""
    program, batch = programs.get(name), make_batch(case)
    answers = [answer(batch, program) for _ in range(runs)]
    out, kv = answers[0]
    error, off, is_left = differences(batch, out, kv)
    moved = sum(other.tobytes() != out.tobytes() for other, _ in answers)
    figures = {
        "error": report.spread([error], "of the largest output"),
        "store, new cells": report.spread([off], "steps of its dtype"),
        "store, blocks of nobody": report.spread([float(not is_left)], "changed"),
        "outputs that move": report.spread([float(moved)], f"of {runs} runs"),
    }
    bounds = {"error": BOUND, "store, new cells": 1.0 if case.fp8 else 0.0}
    limits = {name: report.limit(figure, bounds.get(name, 0.0)) for name, figure in figures.items()}
    return Found(figures=figures, limits=limits)


def steps(args: Namespace) -> list[Step]:
    """A step for each case."""
    interpret, found = (plgpu.InterpretGPUParams(), tiny_cases()) if args.dry_run else (None, cases())
    programs = Ahead({name: partial(_trace, case, interpret) for name, case in found.items()})
    runs, seconds = (1, 60.0) if args.dry_run else (RUNS, 25.0)
    return [
        Step(name=name, run=partial(check, name, case, programs, runs), seconds=seconds) for name, case in found.items()
    ]


def _trace(case: Case, interpret: Any) -> jax.stages.Lowered:
    return trace(make_batch(case), interpret)
