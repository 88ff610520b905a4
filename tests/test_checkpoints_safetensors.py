"""The safetensors reader: against the safetensors package, and on damaged files."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cbjax.checkpoints.safetensors import SafetensorsFile, open_folder


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_])
def test_reads_what_the_package_reads(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "matrix": (rng.standard_normal((3, 5)) * 10).astype(dtype),
        "vector": np.arange(7).astype(dtype),
        "scalar": np.array(1, dtype),
        "empty": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    ours = SafetensorsFile(tmp_path / "x.safetensors")
    assert ours.metadata == {"format": "np"}
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as theirs:
        assert set(ours.shapes) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118 (it is no mapping)
            expected = theirs.get_tensor(name)
            assert ours.shapes[name] == expected.shape
            assert ours.read(name).dtype == expected.dtype
            np.testing.assert_array_equal(ours.read(name), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
    ],
)
def test_reads_dtypes_that_numpy_lacks(tmp_path: Path, name: str, dtype: type) -> None:
    values = np.array([[0.5, -2.0, 448.0], [1.0, 0.0, -0.25]], dtype)
    data = values.tobytes()
    file = SafetensorsFile(write_raw(tmp_path / "x", {"w": entry(name, [2, 3], 0, len(data))}, data))
    assert file.read("w").dtype == dtype
    np.testing.assert_array_equal(file.read("w").astype(np.float32), values.astype(np.float32))


def test_tensor_at_an_odd_offset(tmp_path: Path) -> None:
    data = b"\x07" + np.array([1.5, 2.5], np.float32).tobytes()
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    file = SafetensorsFile(write_raw(tmp_path / "x", header, data))
    np.testing.assert_array_equal(file.read("b"), [1.5, 2.5])


def test_a_view_cannot_be_written(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "x")
    with pytest.raises(ValueError, match="read-only"):
        SafetensorsFile(tmp_path / "x").read("w")[0] = 1


GOOD = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": GOOD}, bytes(4), "truncated: its header describes 8 bytes of data and 4 are there"),
        ({"w": GOOD}, bytes(12), "too long"),
        ({"w": entry("F32", [2], 0, 4)}, bytes(4), r"'w' of F32 \[2\] spans bytes \[0, 4\)"),
        ({"w": entry("F32", [2], 8, 0)}, b"", "spans bytes"),
        ({"w": entry("F32", [-2], 0, 8)}, bytes(8), "malformed"),
        ({"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, bytes(8), "malformed"),
        ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), "malformed"),
        ({"w": 3}, bytes(8), "malformed"),
        ({"w": entry("F4", [2], 0, 8)}, bytes(8), "has dtype 'F4'. Supported: F64"),
        ({"a": GOOD, "b": entry("F32", [2], 12, 20)}, bytes(20), "'b' begins at byte 12 of the data, expected 8"),
        ({"a": GOOD, "b": entry("F32", [2], 4, 12)}, bytes(12), "'b' begins at byte 4"),
        (b"{not json", b"", "header is not JSON"),
        (b"\xff\xfe", b"", "header is not JSON"),
        (b"[1]", b"", "header is not a JSON object"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("keep", [0, 7, 8, 20])
def test_a_file_cut_within_its_header(tmp_path: Path, keep: int) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "x")
    (tmp_path / "cut").write_bytes((tmp_path / "x").read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is not a valid safetensors file.*download it again"):
        SafetensorsFile(tmp_path / "cut")


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        SafetensorsFile(tmp_path / "x")


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    save_file({"a": np.zeros(1, np.float32)}, folder / "1.safetensors")
    save_file({"b": np.ones(2, np.float32)}, folder / "2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_source(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    source = open_folder(tmp_path)
    assert source.shapes == {"a": (1,), "b": (2,)}
    np.testing.assert_array_equal(source.read("b"), [1, 1])


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors", "b": "3.safetensors", "c": "4.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"lacks 3.safetensors, 4.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize("weight_map", [{"a": "2.safetensors", "b": "2.safetensors"}, {"c": "1.safetensors"}])
def test_an_index_that_contradicts_its_files(tmp_path: Path, weight_map: dict[str, str]) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(ValueError, match="places 1 tensors in files that do not hold them, for example"):
        open_folder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    save_file({"a": np.zeros(1, np.float32), "b": np.ones(2, np.float32)}, tmp_path / "2.safetensors")
    with pytest.raises(ValueError, match="tensor 'a' is in both"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}']
)
def test_a_malformed_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="is not a valid safetensors index"):
        open_folder(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks model.safetensors and model.safetensors.index.json"):
        open_folder(tmp_path)
