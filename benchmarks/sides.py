"""Who is compared: cbjax in this process, the peer's modes in theirs, all told the same job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.peer import Peer, Run

OURS, BATCHED, PADDED = "cbjax", "transformers generate_batch", "transformers generate"
PEER_MODES = {BATCHED: "generate_batch", PADDED: "generate"}


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
    """cbjax, in this process."""

    def __init__(self, job: Job) -> None:
        from cbjax import CausalLM, ContinuousBatchingConfig

        self.job, self.lm = job, CausalLM.from_pretrained(job.model, dtype=job.dtype)
        self.config = ContinuousBatchingConfig(
            block_size=job.block_size,
            num_blocks=job.num_blocks,
            max_batch_tokens=job.max_batch_tokens,
            allow_block_sharing=False,
        )

    def run(self, count: int, new_tokens: int) -> Run:
        from cbjax import GenerationConfig

        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        start = time.perf_counter()
        outputs = self.lm.generate_batch(self.job.prompts[:count], generation, self.config)
        seconds = time.perf_counter() - start
        return Run(seconds=seconds, tokens=[output.generated_tokens for output in outputs.values()])

    def close(self) -> None:
        self.lm.close()


@contextmanager
def sides(job: Job, peer_python: Path | None, scratch: Path) -> Iterator[tuple[dict[str, Side], dict[str, str]]]:
    """All sides, ready to run, and the versions of the peer's libraries."""
    opened: list[Ours | Peer] = []
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
        yield made, versions
    finally:
        for side in opened:
            side.close()
