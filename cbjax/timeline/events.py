"""Single events of Chrome's trace format. Times are microseconds since `origin`, to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

type Event = dict[str, Any]


def span(pid: int, tid: int, name: str, begin: float, end: float, origin: float, args: Event | None = None) -> Event:
    """A complete event, from and to these seconds."""
    start = micros(begin, origin)
    duration = round(micros(end, origin) - start, 3)  # so that what touched before rounding still does
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration, "args": args or {}}


def counter(pid: int, name: str, when: float, origin: float, values: dict[str, int]) -> Event:
    """The values of a counter's series from these seconds on."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": micros(when, origin), "args": values}


def names(pid: int, process: str, threads: dict[int, str]) -> Iterator[Event]:
    """What a process and its threads are called; both are shown in the order of their ids."""
    yield _metadata("process_name", pid, 0, name=process)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for tid, thread in threads.items():
        yield _metadata("thread_name", pid, tid, name=thread)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def micros(moment: float, origin: float) -> float:
    """Seconds on a clock as microseconds since `origin`."""
    return round((moment - origin) * 1e6, 3)
