"""A timeline as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cbjax.step_record import PHASES
from cbjax.timeline.measures import BucketTimes, device_activity

if TYPE_CHECKING:
    from cbjax.timeline.timeline import Timeline


def table(timeline: Timeline) -> str:
    """Counts, the device-active fraction, and medians of a step by program: host in microseconds, device in ms."""
    steps = timeline.steps
    activity = device_activity(steps)
    dropped = f", the first {timeline.num_dropped} of them dropped" if timeline.num_dropped else ""
    evicted = f"{steps['soft_resets'].sum()} soft resets, {steps['offloads'].sum()} offloads"
    tokens = [f"{steps[f'{kind}_tokens'].sum()} {kind}" for kind in ("prefill", "decode", "new")]
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(timeline.num_ended.items())) or "none"
    lines = [
        ("steps", f"{timeline.num_steps} in {activity.wall:.3f} s of wall clock{dropped}"),
        ("device active", f"{activity.fraction:.1%} of wall clock, at least {activity.sure_fraction:.1%}"),
        ("tokens", ", ".join(tokens)),
        ("requests", f"{steps['admitted'].sum()} admissions, {evicted}; ended: {ended}"),
    ]
    text = [f"{label.ljust(14)} {value}" for label, value in lines if len(steps) or label == "steps"]
    return "\n".join([*text, "", *_medians(timeline.bucket_times())]) if len(steps) else text[0]


def _medians(rows: Sequence[BucketTimes]) -> list[str]:
    head = ["medians of a step", "steps", "rows", "tokens", *(f"{phase} us" for phase in (*PHASES, "host"))]
    cells = [[*head, "device ms"]]
    for row in rows:
        micros = [f"{seconds * 1e6:.0f}" for seconds in (*row.phases.values(), row.host)]
        cells.append([row.name, str(row.steps), f"{row.rows:g}", f"{row.tokens:g}", *micros, f"{row.device * 1e3:.3f}"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
