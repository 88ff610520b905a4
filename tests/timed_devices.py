"""A device that takes time on a clock of its own, so that what a timeline measures is known."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
from engines import submit
from machines import VOCAB_SIZE, make_config

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.sampling import NUM_WORDS
from cbjax.scheduler import TableDelta
from cbjax.testing import HistoryHashDevice
from cbjax.timeline import Timeline


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Later:
    """An array that is there from a moment on; reading it waits."""

    def __init__(self, values: np.ndarray, clock: Clock, ready: float) -> None:
        self._values, self._clock, self._ready = values, clock, ready

    def is_ready(self) -> bool:
        return self._clock.now >= self._ready

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self._clock.now = max(self._clock.now, self._ready)
        return self._values


class TimedDevice(HistoryHashDevice):
    """Each step takes `step_seconds`, one after another; dispatching takes the host `host_seconds`.

    Attributes:
      busy: (begin, end) of each step on the device.
    """

    def __init__(self, clock: Clock, *, step_seconds: float, host_seconds: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self.clock, self.step_seconds, self.host_seconds = clock, step_seconds, host_seconds
        self.busy: list[tuple[float, float]] = []

    def update_table(self, delta: TableDelta) -> None:
        self.clock.now += self.host_seconds
        super().update_table(delta)

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> SimpleNamespace:
        answer = super().forward(batch, bucket)
        begin = max(self.clock.now, self.busy[-1][1] if self.busy else 0.0)
        self.busy.append((begin, begin + self.step_seconds))
        arrays = {name: Later(getattr(answer, name), self.clock, self.busy[-1][1]) for name in ("logprobs", "finite")}
        return SimpleNamespace(tokens=Later(answer.tokens, self.clock, self.busy[-1][1]), **arrays)

    @property
    def busy_seconds(self) -> float:
        return sum(end - begin for begin, end in self.busy)


def timed_engine(
    *, step_seconds: float, host_seconds: float, depth: int = 0, max_steps: int = 1000
) -> tuple[Engine, TimedDevice, Timeline]:
    """An engine on such a device with three requests, and a timeline that listens to it on the device's clock."""
    clock, config = Clock(), make_config(num_words=NUM_WORDS)
    device = TimedDevice(
        clock,
        step_seconds=step_seconds,
        host_seconds=host_seconds,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_slots=config.max_requests_per_batch,
        max_blocks=config.max_blocks_per_request,
        vocab_size=VOCAB_SIZE,
    )
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    engine = Engine(device, config, ladder, vocab_size=VOCAB_SIZE, max_positions=4096, depth=depth)
    timeline = Timeline(max_steps=max_steps, clock=clock)
    engine.tracer.add(timeline.recorder)
    for name, prompt, new in (("a", 5, 9), ("b", 3, 12), ("c", 11, 7)):
        submit(engine, name, prompt, new)
    return engine, device, timeline


def checked_trace(text: str) -> dict:
    """The events of a trace by (process, thread), after checks of what a viewer relies on.

    Every event has what its kind needs, every track has a name, and spans of a track nest or do not touch.
    """
    events = json.loads(text)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = defaultdict(list)
    for event in events:
        assert event["ph"] in {"X", "C", "M"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0.0
            assert event["dur"] >= 0.0
            tracks[processes[event["pid"]], named[event["pid"], event["tid"]]].append(event)
        elif event["ph"] == "C":
            assert event["ts"] >= 0.0
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            tracks["counters", event["name"]].append(event)
    for (process, _), spans in tracks.items():
        if process != "counters":
            assert_nested(spans, deepest=2 if process == "requests" else 1)
    return tracks


def assert_nested(spans: Iterable[dict], *, deepest: int) -> None:
    """Each span lies in the one that is open, or begins after it; those without any length touch nobody."""
    open_until: list[float] = []
    spans = [event for event in spans if event["dur"]]
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        end = round(event["ts"] + event["dur"], 3)
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert all(end <= outer for outer in open_until), f"{event} ends after the span it lies in"
        open_until.append(end)
        assert len(open_until) <= deepest, f"{event} lies in another span"
