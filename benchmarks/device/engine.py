"""cbjax's engine on a random model of Llama-3-8B's shape, in bfloat16, beside transformers' continuous batching.

Both generate greedily, for the same prompts, as many tokens each, whatever EOS is, with the same blocks and the same
token budget of a step, prefix sharing off, on the same card one after the other. A run is timed from its call to its
return, and the first of each is not counted: it compiles, or captures graphs. Each side draws weights of its own, so
that tokens are not compared: what would be shared is 16 GB.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.device.models import LLAMA_3_8B, TINY, random_model
from benchmarks.device.state import Found, LeftOutError, State, Step
from benchmarks.device.trace import traced
from benchmarks.hf_config import hf_config
from benchmarks.peer import Peer, PeerError
from benchmarks.workload import prompts
from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.models import DecoderConfig

if TYPE_CHECKING:
    from cbjax import CausalLM

MODES = ("sync", "async", "windows")
OURS, TRACED, PEER = "cbjax", "cbjax, device", "transformers generate_batch"
SCRIPT = Path(__file__).with_name("transformers_gpu.py")
# What is asked of a card: of the default, as many times the peer's rate; of the asynchronous loop, a device that works.
LEAST_RATIO = 3.0
ACTIVE, LEAST_ACTIVE = "async, device-active", 0.99
WEIGHTS = "cbjax and transformers have random weights of their own; their tokens are not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model and the work; `traced_tokens` are those of a request while the profiler looks on."""

    config: DecoderConfig = LLAMA_3_8B
    requests: int = 64
    shortest: int = 128
    longest: int = 512
    new_tokens: int = 128
    traced_tokens: int = 24
    block_size: int = 64
    max_batch_tokens: int = 2048
    window: int = 8
    repeats: int = 3

    @property
    def num_blocks(self) -> int:
        """Enough for all requests at their longest."""
        return self.requests * -(-(self.longest + self.new_tokens) // self.block_size)

    @property
    def prompts(self) -> list[list[int]]:
        return prompts(self.requests, self.config.vocab_size, shortest=self.shortest, longest=self.longest)


TINY_SIZES = Sizes(
    config=TINY, requests=2, shortest=8, longest=16, new_tokens=6, traced_tokens=3, block_size=16, max_batch_tokens=32,
    window=2, repeats=1,
)  # fmt: skip


class Ours:
    """The model, made when it is first needed; its programs stay between the steps."""

    def __init__(self, sizes: Sizes, attention: str | None) -> None:
        self.sizes, self.attention = sizes, attention
        self._lm: CausalLM | None = None

    @property
    def lm(self) -> CausalLM:
        if self._lm is None:
            self._lm = random_model(self.sizes.config, "bfloat16")
        return self._lm

    def config(self, mode: str) -> ContinuousBatchingConfig:
        """One program for decode and one for steps with prefill: each takes the compiler a while."""
        sizes = self.sizes
        return ContinuousBatchingConfig(
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            max_batch_tokens=sizes.max_batch_tokens,
            max_requests_per_batch=sizes.requests,
            decode_buckets=(sizes.requests,),
            mixed_buckets=(sizes.max_batch_tokens,),
            allow_block_sharing=False,  # prompts repeat
            attn_implementation=self.attention,
            compilation_cache=False,
            use_async_batching=mode != "sync",
            decode_window=sizes.window if mode == "windows" else 1,
        )

    def run(self, mode: str, new_tokens: int) -> float:
        """Seconds of a call."""
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        start = time.perf_counter()
        outputs = self.lm.generate_batch(self.sizes.prompts, generation, self.config(mode))
        seconds = time.perf_counter() - start
        bad = [str(o.error) for o in outputs.values() if len(o.generated_tokens) != new_tokens]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(outputs)} requests did not get their {new_tokens} tokens: {bad[0]}")
        return seconds

    def decisions(self) -> dict[str, Any]:
        """What the engine decided, and what it compiled."""
        session = self.lm.session
        assert session is not None
        found = {d.field: {"used": str(d.used), "why": d.why} for d in session.resolved.decisions}
        names = ("attn_implementation", "num_blocks", "max_batch_tokens", "async_depth", "decode_window")
        programs = {program.name: round(program.seconds, 2) for program in session.device.programs.values()}
        return {"decisions": {name: found[name] for name in names}, "compile seconds": programs}


def ours(side: Ours, state: State) -> Found:
    """Tokens per second of every mode, taking turns."""
    sizes = side.sizes
    start = time.perf_counter()
    _ = side.lm
    made = time.perf_counter() - start
    first = side.run("sync", sizes.new_tokens)
    figures = {"making the model": report.spread([made], "s"), "first call": report.spread([first], "s")}
    values: dict[str, Any] = side.decisions()
    state.so_far(OURS, Found(figures=figures, values=values))
    tokens = sizes.requests * sizes.new_tokens
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repetition in range(sizes.repeats + 1):
        for mode in MODES:
            seconds = side.run(mode, sizes.new_tokens)
            if repetition:
                rates[mode].append(tokens / seconds)
        figures |= {mode: report.spread(own, "tokens/s") for mode, own in rates.items() if own}
        values["tokens/s"] = {mode: figures[mode]["median"] for mode, own in rates.items() if own}
        state.so_far(OURS, Found(figures=figures, values=values))
    return Found(figures=figures, values=values)


def device_time(side: Ours, state: State) -> Found:
    """How much of a run the device works, by the profiler; by the engine's own timeline where that sees no device."""
    figures: dict[str, report.Figure] = {}
    values: dict[str, Any] = {"by": {}}
    for mode in MODES:
        tokens = side.sizes.traced_tokens
        side.run(mode, tokens)
        with side.lm.timeline() as timeline:
            side.run(mode, tokens)
        activity = timeline.device_activity
        figures[f"{mode}, active by the engine's timeline"] = report.spread([activity.fraction], "fraction")
        found, why = None, "the profiler saw no GPU"
        try:
            found = traced(partial(side.run, mode, tokens))
        except Exception as error:  # a machine may forbid it, and the timeline is there
            why = f"the profiler failed: {error}"
        values["by"][mode] = "the profiler" if found else f"the engine's timeline: {why}"
        fraction = found.busy / found.wall if found else activity.fraction
        figures[f"{mode}, device-active"] = report.spread([fraction], "fraction")
        if found:
            figures[f"{mode}, active between first and last kernel"] = report.spread(
                [found.busy / found.span], "fraction"
            )
            most = [f"{name[:80]}: {1e3 * s:.2f} ms in {found.counts[name]}" for name, s in found.kernels.items()]
            values[f"{mode}, kernels"] = most[:12]
    limits = {}
    if side.sizes.config is LLAMA_3_8B:
        limits[ACTIVE] = report.limit(figures[ACTIVE], LEAST_ACTIVE, at_least=True)
    return Found(figures=figures, limits=limits, values=values)


def theirs(sizes: Sizes, python: str, state: State) -> Found:
    """Tokens per second of transformers, and how many times that cbjax makes."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        told = {
            "config": hf_config(sizes.config),
            "dtype": "bfloat16",
            "attention": "sdpa",
            "prompts": sizes.prompts,
            "block_size": sizes.block_size,
            "max_batch_tokens": sizes.max_batch_tokens,
            "num_blocks": sizes.num_blocks,
        }
        job.write_text(json.dumps(told))
        try:
            peer = Peer(Path(python), "generate_batch", job, script=SCRIPT)
        except (PeerError, OSError) as error:
            if isinstance(error, OSError) or "No module named" in str(error):
                raise LeftOutError(f"{python} has no torch or transformers: {str(error)[-300:]}") from error
            raise
        try:
            runs = [peer.run(sizes.requests, sizes.new_tokens) for _ in range(sizes.repeats + 1)]
        finally:
            peer.close()
    rate = report.spread([run.tokens_per_second for run in runs[1:]], "tokens/s")
    figures = {"first call": report.spread([runs[0].seconds], "s"), "all calls": rate}
    for mode, median in state.steps.get(OURS, {}).get("values", {}).get("tokens/s", {}).items():
        figures[f"cbjax {mode} against it"] = report.spread([median / rate["median"]], "ratio")
    limits = {}
    if sizes.config is LLAMA_3_8B and (ratio := "cbjax windows against it") in figures:
        limits[ratio] = report.limit(figures[ratio], LEAST_RATIO, at_least=True)
    values = {"versions": peer.versions, "settings": list(runs[-1].counts), "tokens/s": rate["median"]}
    return Found(figures=figures, limits=limits, values=values, notes=(WEIGHTS,))


def steps(args: Namespace) -> list[Step]:
    """cbjax first: the peer is a process of its own, and takes what it needs of the card beside it."""
    sizes = TINY_SIZES if args.dry_run else Sizes()
    side = Ours(sizes, args.attention)
    return [
        Step(name=OURS, run=partial(ours, side), seconds=150.0),
        Step(name=PEER, run=partial(theirs, sizes, args.peer_python), seconds=100.0),
        Step(name=TRACED, run=partial(device_time, side), seconds=90.0),
    ]
