"""Programs compiled on other threads before it is their turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

# As many are on their way at a time; what is traced for them holds up the first.
MOST = 6


class Ahead[Name: Hashable]:
    """Programs by name, used in the order of the mapping; each is asked for once at most.

    Tracing stays on the thread that asks, since it holds the interpreter anyway. A program that cannot be traced or
    compiled raises when it is asked for, and keeps nobody else up.
    """

    def __init__(self, traces: Mapping[Name, Callable[[], jax.stages.Lowered]]) -> None:
        self._traces, self._names = traces, list(traces)
        self._started: dict[Name, Future[jax.stages.Compiled]] = {}
        self._pool = ThreadPoolExecutor(MOST, thread_name_prefix="ahead")

    def get(self, name: Name) -> jax.stages.Compiled:
        """The program; raises what tracing or compiling it raised."""
        first = self._names.index(name)
        for other in self._names[first : first + MOST]:
            if other not in self._started:
                self._started[other] = self._start(self._traces[other])
        return self._started[name].result()

    def _start(self, trace: Callable[[], jax.stages.Lowered]) -> Future[Any]:
        try:
            return self._pool.submit(trace().compile)
        except Exception as error:  # belongs to the one who asks for this program
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
