"""A timeline as a trace: JSON in Chrome's trace event format, which https://ui.perfetto.dev opens.

Source: "Trace Event Format", the Chromium project. Complete events (`X`), counters (`C`) and names (`M`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cbjax.step_record import PHASES
from cbjax.timeline.events import Event, counter, names, span
from cbjax.timeline.measures import device_activity
from cbjax.timeline.stays import Stay

if TYPE_CHECKING:
    from cbjax.timeline.recorder import Compilation
    from cbjax.timeline.timeline import Timeline

HOST, DEVICE, SLOTS, COMPILER = 1, 2, 3, 4
# Series of each counter, and the counts that they show.
_COUNTERS = {
    "rows": {"rows": "rows"},
    "tokens": {"prefill": "prefill_tokens", "decode": "decode_tokens"},
    "blocks": {"held": "blocks"},
    "requests": {"running": "running", "waiting": "waiting"},
}
# What a step's span on the device says, the second kind only where it is not 0.
_ALWAYS = ("rows", "prefill_tokens", "decode_tokens", "new_tokens")
_RARE = ("admitted", "ended", "soft_resets", "offloads", "offloaded_blocks", "restores", "restored_blocks", "copies")
_RARE += ("starved", "compiled")


def trace_lines(timeline: Timeline) -> Iterator[str]:
    """The file, piece by piece; one event a line."""
    steps = timeline.steps
    activity = device_activity(steps)
    about = {
        "device_active_fraction_of_wall_clock": _known(activity.fraction),
        "device_active_fraction_of_wall_clock_at_least": _known(activity.sure_fraction),
        "steps": timeline.num_steps,
        "steps_dropped": timeline.num_dropped,
    }
    yield '{"displayTimeUnit":"ms","otherData":' + _json(about) + ',"traceEvents":['
    for number, event in enumerate(trace_events(timeline, steps)):
        yield (",\n" if number else "\n") + _json(event)
    yield "\n]}\n"


def trace_events(timeline: Timeline, steps: np.ndarray) -> Iterator[Event]:
    """Names, then spans and counters; `steps` are the timeline's."""
    stays, loose, compilations = timeline.stays, timeline.loose_phases, timeline.compilations
    first = [float(steps["schedule_begin"][0])] if len(steps) else []
    first += [stay.begin for stay in stays] + [begin for _, begin, _ in loose]
    origin = min([*first, *(each.end - each.seconds for each in compilations)], default=0.0)
    yield from names(HOST, "host: the engine's loop", {1: "phases"})
    yield from names(DEVICE, "device", {1: "steps"})
    yield from names(SLOTS, "requests", {slot + 1: f"slot {slot}" for slot in sorted({stay.slot for stay in stays})})
    buckets = timeline.buckets
    for step in steps:
        yield from _step(step, buckets[step["bucket"]], origin)
    for phase, begin, end in loose:
        yield span(HOST, 1, f"{phase}, no step", begin, end, origin)
    yield from _stays(stays, origin)
    yield from _compilations(compilations, origin)


def _step(step: Any, bucket: str, origin: float) -> Iterator[Event]:
    index = int(step["index"])
    for phase in PHASES:
        begin, end = float(step[f"{phase}_begin"]), float(step[f"{phase}_end"])
        if begin <= end:  # else it has not come to that
            yield span(HOST, 1, phase, begin, end, origin, {"step": index})
    begin, end = float(step["device_begin"]), float(step["device_end"])
    if begin <= end:
        args = {"step": index, "sure_us": round(float(step["device_sure"]) * 1e6, 3)}
        args |= {name: int(step[name]) for name in _ALWAYS} | {name: int(step[name]) for name in _RARE if step[name]}
        yield span(DEVICE, 1, bucket, begin, end, origin, args)
    for name, series in _COUNTERS.items():
        values = {label: int(step[count]) for label, count in series.items()}
        yield counter(HOST, name, float(step["schedule_end"]), origin, values)


def _stays(stays: Sequence[Stay], origin: float) -> Iterator[Event]:
    """A span for each; in it, `prefill` up to the first token and `decode` after it."""
    now = max((moment for s in stays for moment in (s.begin, s.first_token, s.end) if moment is not None), default=0.0)
    for stay in stays:
        tid, end = stay.slot + 1, now if stay.end is None else stay.end
        first = end if stay.first_token is None else stay.first_token
        args = {
            "outcome": stay.outcome or "runs",
            "admitted_before": stay.incarnation,
            "cached_tokens": stay.num_cached,
            "output_tokens": stay.num_tokens,
            "waited_ms": None if stay.waited is None else round(stay.waited * 1e3, 3),
        }
        known = {name: value for name, value in args.items() if value is not None}
        yield span(SLOTS, tid, stay.request_id, stay.begin, end, origin, known)
        yield span(SLOTS, tid, "prefill", stay.begin, first, origin)
        if first < end:
            yield span(SLOTS, tid, "decode", first, end, origin)


def _compilations(compilations: Sequence[Compilation], origin: float) -> Iterator[Event]:
    """In as many lanes as there were at the same time."""
    free_from: list[float] = []  # of each lane
    spans = []
    for each in sorted(compilations, key=lambda each: each.end - each.seconds):
        begin = each.end - each.seconds
        lane = next((lane for lane, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane : lane + 1] = [each.end]
        spans.append(span(COMPILER, lane + 1, each.name, begin, each.end, origin))
    yield from names(COMPILER, "compiler", {lane + 1: f"lane {lane}" for lane in range(len(free_from))})
    yield from spans


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
