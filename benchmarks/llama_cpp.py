"""llama.cpp as another side: its `llama-batched-bench`, over the same weights in the same dtype.

It has no ragged batches there: every prompt has the mean length of ours, all begin and end together, and it tells
seconds and no tokens. `set_up` builds it from the source that the package llama-cpp-python carries.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peer import PeerError, Run

if TYPE_CHECKING:
    from benchmarks.sides import Job

NAME = "llama.cpp"
PACKAGE = "llama-cpp-python==0.3.36"
BENCH, QUANTIZE = "llama-batched-bench", "llama-quantize"
_FORMATS = {"float32": "F32", "bfloat16": "BF16"}
# What of its own is not needed for these two programs.
_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_SERVER=OFF")


def set_up(folder: Path) -> Path:
    """Builds the programs in `folder`, unless they are there, for this very processor; returns where they lie.

    Needs cmake, a C++ compiler and the package index; takes some minutes.
    """
    programs = folder / "build" / "bin"
    if all((programs / name).exists() for name in (BENCH, QUANTIZE)):
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True, stdout=sys.stderr)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    source_folder = archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor" / "llama.cpp"
    build = folder / "build"
    subprocess.run(["cmake", "-S", source_folder, "-B", build, *_OPTIONS], check=True, stdout=sys.stderr)
    make = ["cmake", "--build", build, "--parallel", "--target", BENCH, QUANTIZE]
    subprocess.run(make, check=True, stdout=sys.stderr)
    return programs


def gguf_in(programs: Path, gguf: Path, dtype: str, folder: Path) -> Path:
    """The weights of a GGUF file in this dtype, as another one in `folder`."""
    made = folder / f"{dtype}.gguf"
    command = [programs / QUANTIZE, "--allow-requantize", gguf, made, _FORMATS[dtype]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return made


class LlamaCpp:
    """A `Side`: each run is a process that loads the model, warms up and times itself."""

    def __init__(self, programs: Path, gguf: Path, job: Job) -> None:
        self.programs, self.job = programs, job
        self._folder = tempfile.TemporaryDirectory()
        self._model = gguf_in(programs, gguf, job.dtype, Path(self._folder.name))

    def run(self, count: int, new_tokens: int) -> Run:
        """Generates `new_tokens` for `count` prompts of the mean length of the job's first ones.

        Raises:
          PeerError: it failed.
        """
        prompts = self.job.prompts[:count]
        length = round(sum(map(len, prompts)) / count)
        options = {
            "--model": self._model,
            "--ctx-size": count * (length + new_tokens),
            "--batch-size": self.job.max_batch_tokens,
            "--ubatch-size": self.job.max_batch_tokens,
            "--threads": self.job.threads,
            "--threads-batch": self.job.threads,
            "-npp": length,
            "-ntg": new_tokens,
            "-npl": count,
            "--output-format": "jsonl",
        }
        words = [str(word) for option in options.items() for word in option]
        done = subprocess.run([self.programs / BENCH, *words], capture_output=True, text=True, check=False)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or len(answers) != 1:
            raise PeerError(f"{BENCH} ended with exit code {done.returncode}; it said: {done.stderr[-2000:]}")
        return Run(seconds=answers[0]["t"], tokens=[[-1] * new_tokens] * count)

    def close(self) -> None:
        """Removes its copy of the weights."""
        self._folder.cleanup()
