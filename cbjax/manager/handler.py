"""A callback for the outputs of one request."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable

from cbjax.requests import GenerationOutput

log = logging.getLogger(__name__)

type Callback = Callable[[GenerationOutput], object]


class Handler:
    """Calls back on the event loop it was made in, or, made outside of one, on the thread that tells it.

    What the callback raises is logged and goes no further.
    """

    def __init__(self, callback: Callback) -> None:
        if not callable(callback) or inspect.iscoroutinefunction(callback):
            raise TypeError(f"a result handler is a plain function of one GenerationOutput; got {callback!r:.80}")
        self._callback = callback
        self._event_loop = _running_event_loop()

    def __call__(self, output: GenerationOutput) -> None:
        if self._event_loop is None:
            self._run(output)
            return
        try:
            self._event_loop.call_soon_threadsafe(self._run, output)
        except RuntimeError:
            log.warning("the handler of request %r is not called: its event loop is closed", output.request_id)

    def _run(self, output: GenerationOutput) -> None:
        try:
            self._callback(output)
        except BaseException as error:  # on the manager's thread it would end the manager, and every request with it
            if self._event_loop is not None and isinstance(error, KeyboardInterrupt):
                raise  # a Ctrl-C, which the thread of an event loop can get
            log.exception("the handler of request %r raised", output.request_id)


def _running_event_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
