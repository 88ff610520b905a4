"""A reader of `.safetensors` files: one memory map, no copy, every dtype that NumPy and ml_dtypes know.

The format is an 8-byte little-endian length, a JSON header of that length, then the tensors' bytes
(https://huggingface.co/docs/safetensors). The `safetensors` package cannot read FP8 through NumPy and
copies each tensor; here a tensor is a view of the map, so loading holds no second copy of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cbjax.checkpoints.source import damaged

_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
# The limit of the reference implementation; a larger length means "not this format".
_MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFile:
    """One file, mapped read-only. Implements `TensorSource`.

    Attributes:
        metadata: the header's free `__metadata__` strings.

    Raises:
        ValueError: the file is truncated, too long, or its header breaks the format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 8:
            raise damaged(self.path, "safetensors", f"it has {size} bytes, fewer than the 8 of its length")
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            start = self._bytes[:64].tobytes()
            reason = f"its first 8 bytes announce a header of {length} bytes, and {size - 8} follow"
            raise damaged(self.path, "safetensors", reason, start)
        self._data_start = 8 + length
        header = self._parse_header(self._bytes[8 : self._data_start].tobytes())
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._entries = {name: self._parse_entry(name, entry) for name, entry in header.items()}
        self._check_layout(size - self._data_start)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _) in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file."""
        dtype, shape, (begin, end) = self._entries[name]
        raw = self._bytes[self._data_start + begin : self._data_start + end]
        return raw.view(np.ndarray).view(dtype).reshape(shape)

    def _parse_header(self, raw: bytes) -> dict[str, Any]:
        try:
            header = json.loads(raw)
        except ValueError as error:
            raise damaged(self.path, "safetensors", f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise damaged(self.path, "safetensors", "its header is not a JSON object")
        return header

    def _parse_entry(self, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
        try:
            dtype_name, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            numbers = (*shape, begin, end)
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError(f"shape and data_offsets must be integers >= 0, not {numbers}")
            if not isinstance(dtype_name, str):
                raise TypeError(f"dtype must be a string, not {dtype_name!r}")
        except (KeyError, TypeError, ValueError) as error:
            reason = f"the header entry of tensor {name!r} is malformed ({error!r})"
            raise damaged(self.path, "safetensors", reason) from error
        if dtype_name not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ValueError(f"{self.path}: tensor {name!r} has dtype {dtype_name!r}. Supported: {known}.")
        dtype = _DTYPES[dtype_name]
        if end - begin != math.prod(shape) * dtype.itemsize:
            reason = f"tensor {name!r} of {dtype_name} {list(shape)} spans bytes [{begin}, {end})"
            raise damaged(self.path, "safetensors", reason)
        return dtype, shape, (begin, end)

    def _check_layout(self, data_bytes: int) -> None:
        """The tensors cover the data exactly: no hole, no overlap, nothing missing, nothing left over."""
        position = 0
        for begin, end, name in sorted((*offsets, name) for name, (_, _, offsets) in self._entries.items()):
            if begin != position:
                reason = f"tensor {name!r} begins at byte {begin} of the data, expected {position}"
                raise damaged(self.path, "safetensors", reason)
            position = end
        if position != data_bytes:
            verb = "truncated" if position > data_bytes else "too long"
            reason = f"it is {verb}: its header describes {position} bytes of data and {data_bytes} are there"
            raise damaged(self.path, "safetensors", reason)


class ShardedSafetensors:
    """Several files as one `TensorSource`; with `weight_map` (name -> file), tensors must be where it says.

    Raises:
        ValueError: a name appears in two files, or the map and the files disagree.
    """

    def __init__(self, files: Iterable[SafetensorsFile], weight_map: Mapping[str, str] | None = None) -> None:
        self._owner: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.shapes:
                if name in self._owner:
                    raise ValueError(f"tensor {name!r} is in both {self._owner[name].path} and {file.path}.")
                self._owner[name] = file
        if weight_map is not None:
            absent = [name for name, shard in weight_map.items() if self._shard_of(name) != shard]
            if absent:
                raise ValueError(
                    f"{INDEX_NAME} places {len(absent)} tensors in files that do not hold them, for example "
                    f"{absent[0]!r} in {weight_map[absent[0]]}; download the checkpoint again."
                )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: file.shapes[name] for name, file in self._owner.items()}

    def read(self, name: str) -> np.ndarray:
        return self._owner[name].read(name)

    def _shard_of(self, name: str) -> str | None:
        return self._owner[name].path.name if name in self._owner else None


def open_folder(folder: Path) -> SafetensorsFile | ShardedSafetensors:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises:
        FileNotFoundError: a file is missing; all missing ones are named.
        ValueError: a file or the index is malformed.
    """
    if missing := missing_files(folder):
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}; weights are read from {SINGLE_NAME}, or from {INDEX_NAME} "
            "and the files it names (convert other formats with transformers' save_pretrained)."
        )
    if (folder / SINGLE_NAME).is_file():
        return SafetensorsFile(folder / SINGLE_NAME)
    weight_map = _weight_map(folder / INDEX_NAME)
    return ShardedSafetensors(map(SafetensorsFile, sorted({folder / name for name in weight_map.values()})), weight_map)


def missing_files(folder: Path) -> list[str]:
    """Names of the weight files that `folder` lacks. Raises ValueError for a malformed index."""
    if (folder / SINGLE_NAME).is_file():
        return []
    if not (folder / INDEX_NAME).is_file():
        return [f"{SINGLE_NAME} and {INDEX_NAME}"]
    shards = sorted(set(_weight_map(folder / INDEX_NAME).values()))
    return [name for name in shards if not (folder / name).is_file()]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name in the index's own folder."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        outside = [name for name in weight_map.values() if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(index, "safetensors index", f"it has no usable weight_map ({error!r})") from error
    if outside:
        raise damaged(index, "safetensors index", f"it names {outside[0]!r}, which is not a file beside it")
    return weight_map
