"""The GGUF reader: against the gguf package's reader, and on damaged files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import hf_tensors, write_gguf
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from cbjax.checkpoints.gguf import GGUFFile

METADATA = {
    "test.flag": True,
    "test.number": 7,
    "test.fraction": 0.5,
    "test.text": "ä\n日本",
    "test.strings": ["a", "", "Ġb"],
    "test.integers": [1, -2, 3],
    "test.floats": [0.25, -1.0],
}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_reads_what_the_package_reads(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(), kind=kind, metadata=METADATA)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for name, field in fields.items():
        assert ours.metadata[name] == field.contents(), name
        assert type(ours.metadata[name]) is type(field.contents()), name
    assert set(ours.shapes) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        assert ours.shapes[tensor.name] == expected.shape
        assert ours.read(tensor.name).dtype == np.float32
        np.testing.assert_array_equal(ours.read(tensor.name), expected)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", hf_tensors(), metadata=METADATA).read_bytes()
    cuts = [*range(0, 1500, 7), *range(1500, len(whole), 2003), len(whole) - 1]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut.gguf is not a valid GGUF file.*download it again"):
            GGUFFile(tmp_path / "cut.gguf")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), b"gguf" + bytes(100)])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="is not a valid GGUF file"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_an_unsupported_version(tmp_path: Path, version: int) -> None:
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", version, 0, 0))
    with pytest.raises(ValueError, match=f"GGUF version {version} or big-endian; .*versions 2 and 3 are read"):
        GGUFFile(tmp_path / "m.gguf")


def header(key: bytes, body: bytes) -> bytes:
    """A file with one metadata key, whose type and value are `body`, and no tensor."""
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key + body


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"k", struct.pack("<IQ", 8, 1 << 60) + b"abc"), "truncated"),
        (header(b"k", struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(64)), "truncated"),
        (header(b"k", struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(64)), "truncated"),
        (header(b"k", struct.pack("<I", 77) + bytes(8)), "value type 77 does not exist"),
        (header(b"\xff", struct.pack("<IB", 7, 1)), "a string is not UTF-8"),
        (header(b"general.alignment", struct.pack("<II", 4, 0)), "general.alignment is 0"),
    ],
)
def test_malformed_metadata(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GGUFFile(tmp_path / "m.gguf")


def one_tensor(type_id: int, dimensions: tuple[int, ...], data: bytes) -> bytes:
    table = struct.pack("<Q1sI", 1, b"w", len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + table + struct.pack("<IQ", type_id, 0)
    return head + bytes(-len(head) % 32) + data


def test_tensor_types_that_cannot_be_dequantised_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_tensor(Kind.Q8_1, (32,), bytes(40)))
    with pytest.raises(ValueError, match="tensors of type Q8_1, which the gguf package cannot dequantise"):
        GGUFFile(tmp_path / "m.gguf")


def test_a_tensor_type_from_the_future(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_tensor(9999, (32,), bytes(64)))
    with pytest.raises(ValueError, match="'w' has type number 9999"):
        GGUFFile(tmp_path / "m.gguf")


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_tensor(Kind.Q8_0, (33, 2), bytes(128)))
    with pytest.raises(ValueError, match=r"rows of tensor 'w' \[2, 33\] are not whole blocks of 32"):
        GGUFFile(tmp_path / "m.gguf")
