"""Who is compared: cbjax in this process, the peer's modes in theirs, all told the same job."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import llama_cpp as llama
from benchmarks.peer import Peer, Run, set_up

OURS, BATCHED, PADDED = "cbjax", "transformers generate_batch", "transformers generate"
PEER_MODES = {BATCHED: "generate_batch", PADDED: "generate"}


def add_side_options(options: ArgumentParser, *, block_size: int) -> None:
    """Who the peer is, and what all sides are told."""
    peer = options.add_mutually_exclusive_group(required=True)
    peer.add_argument("--peer-python", type=Path, metavar="PATH", help="Python of the peer's environment")
    peer.add_argument("--setup-peer", type=Path, metavar="DIR", help="make the peer's environment there, and use it")
    peer.add_argument("--only", choices=["cbjax"], help="without a peer")
    options.add_argument("--new-tokens", type=int, default=64, help="of a request (default 64)")
    options.add_argument("--repeats", type=int, default=3, help="counted runs of each side (default 3)")
    options.add_argument("--threads", type=int, default=2, help="cores for each side (default 2)")
    options.add_argument(
        "--block-size", type=int, default=block_size, help=f"tokens of a KV block (default {block_size})"
    )
    options.add_argument("--max-batch-tokens", type=int, default=512, help="token budget of a step (default 512)")


def peer_python_of(args: Namespace) -> Path | None:
    """Python of the peer's environment, which is made if that was asked for; None: there is no peer."""
    return set_up(args.setup_peer) if args.setup_peer else args.peer_python


class Side(Protocol):
    """Something that generates `new_tokens` for the first `count` prompts."""

    def run(self, count: int, new_tokens: int) -> Run: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every side is told; written as the peer's job file."""

    model: str
    dtype: str
    threads: int
    prompts: list[list[int]]
    block_size: int
    max_batch_tokens: int
    num_blocks: int

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({name: getattr(self, name) for name in self.__slots__}))
        return path


class Ours:
    """cbjax, in this process; `cpu_offload_space` GiB of host memory take the KV of requests that lose their blocks."""

    def __init__(self, job: Job, *, cpu_offload_space: float = 0.0) -> None:
        from cbjax import CausalLM, ContinuousBatchingConfig

        self.job, self.lm = job, CausalLM.from_pretrained(job.model, dtype=job.dtype)
        self.config = ContinuousBatchingConfig(
            block_size=job.block_size,
            num_blocks=job.num_blocks,
            max_batch_tokens=job.max_batch_tokens,
            allow_block_sharing=False,
            cpu_offload_space=cpu_offload_space,
        )

    def run(self, count: int, new_tokens: int) -> Run:
        from cbjax import GenerationConfig

        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        start = time.perf_counter()
        outputs = self.lm.generate_batch(self.job.prompts[:count], generation, self.config)
        seconds = time.perf_counter() - start
        summary = self.lm.summary
        assert summary is not None
        counts = {
            "evictions": summary.soft_resets + summary.offloads,
            "recomputed tokens": summary.recomputed_tokens,
            "copied MiB": summary.copied_bytes / 2**20,
        }
        tokens = [output.generated_tokens for output in outputs.values()]
        return Run(seconds=seconds, tokens=tokens, counts=counts)

    def close(self) -> None:
        self.lm.close()


@contextmanager
def sides(
    job: Job, peer_python: Path | None, scratch: Path, *, llama_cpp: tuple[Path, Path] | None = None
) -> Iterator[tuple[dict[str, Side], dict[str, str]]]:
    """All sides, ready to run, and the versions of the peer's libraries; `llama_cpp`: its programs, the GGUF file."""
    opened: list[Ours | Peer | llama.LlamaCpp] = []
    try:
        ours = Ours(job)
        opened.append(ours)
        made: dict[str, Side] = {OURS: ours}
        versions: dict[str, str] = {}
        for name, mode in PEER_MODES.items() if peer_python else ():
            assert peer_python is not None
            peer = Peer(peer_python, mode, job.write(scratch / "job.json"))
            opened.append(peer)
            made[name] = peer
            versions = peer.versions
        if llama_cpp is not None:
            other = llama.LlamaCpp(*llama_cpp, job)
            opened.append(other)
            made[llama.NAME] = other
        yield made, versions
    finally:
        for side in opened:
            side.close()
