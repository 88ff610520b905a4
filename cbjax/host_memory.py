"""Memory of the host process that the allocator keeps although nobody uses it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back_freed_memory() -> None:
    """Returns freed heap to the operating system where glibc would keep it.

    A compiler leaves behind hundreds of megabytes of free heap; without this they count as the process's for good.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
