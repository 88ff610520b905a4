"""Progress bars, in terminals and notebooks alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


@functools.cache
def bar_class(*, show: bool) -> Any:
    """A class of `tqdm` bars; without `show` they stay silent. For libraries that make their own bars."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's watcher thread would outlive the bar

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{"disable": not show, **settings})

    return Bar


def progress(iterable: Iterable[Any] | None = None, *, show: bool, **settings: Any) -> Any:
    """A `tqdm` bar over `iterable`, silent unless `show`; `settings` are tqdm's."""
    return bar_class(show=show)(iterable, **settings)
