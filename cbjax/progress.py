"""Progress bars, in terminals and notebooks alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


@functools.cache
def _bar_class() -> Any:
    from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # tqdm's watcher thread would outlive the bar

    return Bar


def progress(iterable: Iterable[Any] | None = None, *, show: bool, **settings: Any) -> Any:
    """A `tqdm` bar over `iterable`, silent unless `show`; `settings` are tqdm's."""
    return _bar_class()(iterable, disable=not show, **settings)
