"""Many simulations of one trace that differ in a setting or two, and their table."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cbjax.progress import progress
from cbjax.scheduler import SchedulerConfig, eviction_named, scheduler_named
from cbjax.simulate.cost import CostModel
from cbjax.simulate.result import Result
from cbjax.simulate.run import simulate
from cbjax.simulate.trace import Trace

# Settings that are named in words, and what the config holds.
_NAMED = {"policy": scheduler_named, "eviction": eviction_named}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulation of a sweep.

    Attributes:
      settings: what was varied, and its value here.
      result: what it came to; None if the pool was too small for the trace.
      error: why, then.
    """

    settings: Mapping[str, Any]
    result: Result | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All combinations of what was varied, the last setting fastest.

    Attributes:
      trace: its name.
      points: one per combination.
    """

    trace: str
    points: tuple[Point, ...]

    def __str__(self) -> str:
        names = list(self.points[0].settings)
        header = [*names, "completed", "refused", "hit rate", "soft resets", "offloads", "computed again"]
        header += ["blocks at most", "waiting p90", "first token p90", "inter token p90", "tokens/s", "steps"]
        lines = [header, *([*map(_cell, point.settings.values()), *_cells(point)] for point in self.points)]
        widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(header))]
        return "\n".join("  ".join(map(str.rjust, line, widths[: len(line)])) for line in lines)

    def to_json(self) -> str:
        """Settings and results as text."""
        points = [
            {"settings": dict(p.settings), "error": p.error, "result": None if p.result is None else p.result.to_dict()}
            for p in self.points
        ]
        return json.dumps({"format": "cbjax.simulate.Sweep/1", "trace": self.trace, "points": points}, indent=1)


def run_sweep(
    trace: Trace,
    config: SchedulerConfig,
    vary: Mapping[str, Sequence[Any]],
    *,
    cost: CostModel | None = None,
    processes: int = 1,
    progress_bar: bool = False,
) -> Sweep:
    """Simulates every combination of `vary`.

    Args:
      config: for all that is not varied. With `num_blocks` varied a request may fill the whole pool.
      vary: names of `SchedulerConfig`'s fields to their values, policies by name.
      cost: as for `simulate`.
      processes: that run at a time; the results do not depend on it.

    Raises:
      ValueError: no such setting, no value, or one outside its range.
    """
    unknown = sorted(set(vary) - {f.name for f in fields(config)})
    if unknown or not vary or not all(len(values) for values in vary.values()):
        known = ", ".join(f.name for f in fields(config))
        raise ValueError(f"vary maps settings ({known}) to one value or more each; got {unknown or dict(vary)}")
    if processes < 1:
        raise ValueError(f"processes must be at least 1; got {processes}")
    settings = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    jobs = [(trace, _changed(config, changes), cost) for changes in settings]
    with progress(show=progress_bar, total=len(jobs), desc="simulating", unit="run") as bar:
        if processes == 1:
            outcomes = [_done(bar, _run(job)) for job in jobs]
        else:
            # Started anew and not forked: a fork of a process that has used jax can hang.
            with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
                outcomes = [_done(bar, outcome) for outcome in pool.imap(_run, jobs)]
    points = [Point(settings=s, result=r, error=e) for s, (r, e) in zip(settings, outcomes, strict=True)]
    return Sweep(trace=trace.name, points=tuple(points))


type _Outcome = tuple[Result | None, str | None]


def _run(job: tuple[Trace, SchedulerConfig, CostModel | None]) -> _Outcome:
    trace, config, cost = job
    if (trace.num_cells > config.max_request_tokens).all():
        return None, "no request fits the pool"
    return simulate(trace, config, cost=cost), None


def _changed(config: SchedulerConfig, changes: Mapping[str, Any]) -> SchedulerConfig:
    """The config with these settings; a block table as wide as the pool stays so."""
    values = {name: _NAMED[name](value) if name in _NAMED else value for name, value in changes.items()}
    if "num_blocks" in changes and "max_blocks_per_request" not in changes:
        values["max_blocks_per_request"] = changes["num_blocks"]
    return replace(config, **values)


def _done(bar: Any, outcome: _Outcome) -> _Outcome:
    bar.update()
    return outcome


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _cells(point: Point) -> list[str]:
    result = point.result
    if result is None:
        return [point.error or ""]
    times = result.quantiles()
    counts = (result.soft_resets, result.offloads, result.recomputed_tokens)
    return [
        *(f"{count:,}" for count in (result.completed, result.refused)),
        f"{result.hit_rate:.1%}",
        *(f"{count:,}" for count in counts),
        f"{result.peak_blocks:,}",
        *(f"{times[name][1]:.3g} s" for name in ("waiting", "first_token", "inter_token")),
        f"{result.tokens_per_second:,.0f}",
        f"{result.num_steps:,}",
    ]
