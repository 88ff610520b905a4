"""A reader of `.gguf` files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Header, metadata and tensor table are parsed here from one memory map: `gguf.GGUFReader` makes an array per
string and takes seconds for a vocabulary of 50k. Dequantisation is the `gguf` package's, which is llama.cpp's
own. Every length is checked against the file before it is used, so a truncated file is an error, not a crash.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbjax.checkpoints.source import damaged

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# GGUF value type -> little-endian NumPy dtype.
_SCALARS: Mapping[int, np.dtype] = {
    code: np.dtype(spec) for code, spec in enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<b1"])
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies.

    Attributes:
        shape: row-major; the file stores it reversed.
        type_id: a `gguf.GGMLQuantizationType`.
        begin, end: its bytes are [begin, end) of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    begin: int
    end: int


class GGUFFile:
    """One file, mapped read-only. Implements `TensorSource`; `read` dequantises to float32.

    Attributes:
        metadata: key -> bool, int, float, str or list of these.
        tensors: name -> GGUFTensor.

    Raises:
        ValueError: not a GGUF file, of an unsupported version, truncated, or with tensor types that the
            `gguf` package cannot dequantise (all are named).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.stat().st_size < 24:
            raise damaged(self.path, "GGUF", f"it has {self.path.stat().st_size} bytes, fewer than a header")
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self.path, memoryview(self._bytes))
        num_tensors, num_keys = _read_header(cursor)
        try:
            self.metadata: dict[str, Any] = dict(_read_metadata(cursor, num_keys))
            self.tensors: dict[str, GGUFTensor] = dict(self._read_table(cursor, num_tensors))
        except UnicodeDecodeError as error:
            raise damaged(self.path, "GGUF", f"a string is not UTF-8 ({error})") from error
        self._check_types()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32; a view of the map where the file holds float32."""
        from gguf import quants

        tensor = self.tensors[name]
        raw = self._bytes[tensor.begin : tensor.end].view(np.ndarray)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return quants.dequantize(rows, _quantization(tensor.type_id)).reshape(tensor.shape)

    def _read_table(self, cursor: _Cursor, count: int) -> Iterator[tuple[str, GGUFTensor]]:
        table = []
        for _ in range(count):
            name = cursor.string()
            (num_dims,) = cursor.unpack("<I")
            shape = cursor.unpack(f"<{min(num_dims, 64)}Q")[::-1]
            type_id, offset = cursor.unpack("<IQ")
            table.append((name, shape, type_id, offset))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise damaged(self.path, "GGUF", f"general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, type_id, offset in table:
            begin = data_start + offset
            end = begin + self._num_bytes(name, shape, type_id)
            if end > len(self._bytes):
                reason = f"it is truncated: tensor {name!r} ends at byte {end}, the file at {len(self._bytes)}"
                raise damaged(self.path, "GGUF", reason)
            yield name, GGUFTensor(shape=shape, type_id=type_id, begin=begin, end=end)

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[_quantization(type_id, self.path, name)]
        if shape and shape[-1] % block:
            reason = f"rows of tensor {name!r} {list(shape)} are not whole blocks of {block} values"
            raise damaged(self.path, "GGUF", reason)
        return math.prod(shape) // block * size

    def _check_types(self) -> None:
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES

        unsupported = []
        for type_id in sorted({tensor.type_id for tensor in self.tensors.values()}):
            kind = _quantization(type_id)
            try:
                quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                unsupported.append(kind.name)
        if unsupported:
            raise ValueError(
                f"{self.path} holds tensors of type {', '.join(unsupported)}, which the gguf package cannot "
                "dequantise; use a file with F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or K-quant tensors."
            )


class _Cursor:
    """Reads little-endian values one after another and never past the end of the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path, self.view, self.position = path, view, 0

    def take(self, count: int) -> memoryview:
        begin, self.position = self.position, self.position + count
        if self.position > len(self.view):
            reason = f"it is truncated: byte {self.position} is needed and the file has {len(self.view)}"
            raise damaged(self.path, "GGUF", reason)
        return self.view[begin : self.position]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        return str(self.take(self.unpack("<Q")[0]), "utf-8")

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            item, count = self.unpack("<IQ")
            if item in _SCALARS:
                return np.frombuffer(self.take(count * _SCALARS[item].itemsize), _SCALARS[item]).tolist()
            return [self.value(item) for _ in range(count)]
        if code in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[code].itemsize), _SCALARS[code])[0].item()
        raise damaged(self.path, "GGUF", f"metadata value type {code} does not exist")


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Returns (number of tensors, number of metadata keys)."""
    start = bytes(cursor.view[:64])
    if not start.startswith(_MAGIC):
        raise damaged(cursor.path, "GGUF", f"it begins with {start[:4]!r} instead of {_MAGIC!r}", start)
    _, version, num_tensors, num_keys = cursor.unpack("<4sIQQ")
    if version not in _VERSIONS:
        raise ValueError(
            f"{cursor.path} is GGUF version {version} or big-endian; little-endian versions "
            f"{' and '.join(map(str, _VERSIONS))} are read. Convert the model again with a current llama.cpp."
        )
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key = cursor.string()
        yield key, cursor.value(cursor.unpack("<I")[0])


def _quantization(type_id: int, path: Path | None = None, name: str = "") -> Any:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(type_id)
    except ValueError as error:
        raise ValueError(
            f"{path}: tensor {name!r} has type number {type_id}, unknown to the gguf package; upgrade it."
        ) from error
