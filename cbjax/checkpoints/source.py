"""What every tensor reader offers, and the errors that readers share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Named tensors of a checkpoint, read one at a time.

    Attributes:
        shapes: name -> shape, for every tensor of the checkpoint.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, of shape `shapes[name]`. It may be a view of the file: copy before keeping it."""
        ...


_LFS_POINTER = b"version https://git-lfs"


def damaged(path: Path, kind: str, reason: str, start: bytes = b"") -> ValueError:
    """The error for a file that is not a whole `kind` file; `start` is its first bytes."""
    if start.startswith(_LFS_POINTER):
        reason = "it is a Git LFS pointer, not the file itself"
        remedy = "run `git lfs pull` in the folder, or download the file"
    else:
        remedy = "download it again, and compare its size with the source's"
    return ValueError(f"{path} is not a valid {kind} file: {reason}; {remedy}.")
