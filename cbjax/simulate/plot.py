"""Pictures of a simulation and of a sweep. They need matplotlib, an extra: ``pip install cbjax[plot]``.

A figure is written with its own `savefig`, whose file name's ending says in which format; no display is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cbjax.simulate.result import Result
from cbjax.simulate.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_result(result: Result) -> Figure:
    """A run in four panels: the pool and the line over time, and the distributions of waiting and inter-token times.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure = _figure(10, 7)
    (pool, line), (waits, tokens) = figure.subplots(2, 2)
    timeline = result.timeline
    pool.stackplot(timeline.seconds, timeline.live, timeline.cached, labels=["held", "cached"], alpha=0.8)
    pool.axhline(result.num_blocks, color="black", linewidth=0.8)
    pool.axhline(result.num_blocks * (1 - result.safety_margin), color="black", linestyle=":", linewidth=0.8)
    _dress(pool, "blocks (dotted: where the reserve begins)", "s", "blocks")
    pool.legend(loc="lower right")
    line.plot(timeline.seconds, timeline.running, label="running")
    line.plot(timeline.seconds, timeline.waiting, label="waiting")
    _dress(line, "requests", "s", "requests")
    line.legend(loc="upper right")
    for name, times in (("to admission", result.waiting), ("to first token", result.first_token)):
        times = np.sort(times[~np.isnan(times)])
        waits.plot(times, np.arange(1, len(times) + 1) / len(times), label=name)
    _dress(waits, "from arrival", "s", "fraction of requests")
    waits.legend(loc="lower right")
    fractions = np.linspace(0.001, 0.999, 500)
    tokens.plot(1e3 * np.array(result.inter_token.quantiles(fractions.tolist())), fractions)
    tokens.set_xscale("log")
    _dress(tokens, "between tokens", "ms", "fraction of tokens")
    figure.suptitle(
        f"{result.trace}: {result.num_blocks:,} blocks of {result.block_size}, margin {result.safety_margin:g}, "
        f"{result.policy}; {result.soft_resets:,} soft resets, {result.offloads:,} offloads"
    )
    return figure


def plot_sweep(sweep: Sweep) -> Figure:
    """A sweep in four panels over the setting that varies fastest, one line for each choice of the others.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure = _figure(10, 7)
    *others, last = sweep.points[0].settings
    panels: list[tuple[str, str, Callable[[Result], float]]] = [
        ("prefix cache", "% of prompt tokens found", lambda r: 100 * r.hit_rate),
        ("KV pressure", "evictions", lambda r: r.evictions),
        ("first token, p90", "s", lambda r: r.quantiles()["first_token"][1]),
        ("throughput", "generated tokens/s", lambda r: r.tokens_per_second),
    ]
    lines: dict[tuple[Any, ...], list[tuple[Any, Result]]] = {}
    for point in sweep.points:
        if point.result is not None:
            key = tuple(point.settings[name] for name in others)
            lines.setdefault(key, []).append((point.settings[last], point.result))
    for axes, (title, unit, value) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for key, results in lines.items():
            label = ", ".join(f"{name} {chosen}" for name, chosen in zip(others, key, strict=True))
            axes.plot([x for x, _ in results], [value(r) for _, r in results], marker="o", label=label)
        _dress(axes, title, last, unit)
        if others and lines:
            axes.legend()
    figure.suptitle(sweep.trace)
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install cbjax[plot]") from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
