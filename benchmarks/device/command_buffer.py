"""Whether XLA launches a decode step as command buffers (CUDA graphs), and what is left outside of them.

Old versions of XLA marked them in the compiled HLO. Those of today make them afterwards, from the sequence of thunks,
which they write where `--xla_dump_to` says; the part's process is started with it. What the profiler sees of a run is
in the engine's part.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.device.models import LLAMA_3_8B, TINY, random_model
from benchmarks.device.state import Found, LeftOutError, State, Step
from cbjax import ContinuousBatchingConfig, WorkloadHints
from cbjax.descriptor import Bucket
from cbjax.models import DecoderConfig

LAYERS = 2
BUFFER, LOOPS = "kCommandBuffer", ("kWhile", "kConditional")
# A line of a dump: its place in the nesting is how far it is indented.
_THUNK = re.compile(r"^( *)(\d{3,}): (k[A-Za-z]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thunks:
    """What a program launches.

    Attributes:
      buffers: command buffers.
      inside, outside: launches in them, and beside them, by kind; loops and the buffers themselves are none.
      loops: by kind, in no buffer; around each turn of one whose number is not known the host is waited for.
    """

    buffers: int
    inside: dict[str, int]
    outside: dict[str, int]
    loops: dict[str, int]

    @property
    def share(self) -> float:
        """Of the launches that are in a command buffer."""
        inside, outside = sum(self.inside.values()), sum(self.outside.values())
        return inside / max(1, inside + outside)


def read_thunks(text: str) -> Thunks:
    """A dump's `thunk_sequence_after_thunk_passes`."""
    inside, outside, loops = Counter[str](), Counter[str](), Counter[str]()
    buffers = 0
    around: int | None = None  # how far the buffer that we are in is indented
    for match in filter(None, map(_THUNK.match, text.splitlines())):
        depth, kind = len(match[1]), match[3]
        if around is not None and depth <= around:
            around = None
        if kind == BUFFER:
            buffers += 1
            around = depth
        elif around is None and kind in LOOPS:
            loops[kind] += 1
        elif kind not in LOOPS:
            (outside if around is None else inside)[kind] += 1
    return Thunks(buffers=buffers, inside=dict(inside), outside=dict(outside), loops=dict(loops))


def dump_folder(flags: str) -> Path | None:
    """Where XLA_FLAGS say that dumps go."""
    found = re.search(r"--xla_dump_to=(\S+)", flags)
    return Path(found[1]) if found else None


def newest_thunks(folder: Path | None, before: Sequence[Path]) -> Thunks:
    """Of the program that was compiled after `before` were there.

    Raises:
      LeftOutError: XLA has written none, as for a CPU.
    """
    new = sorted(set(_dumps(folder)) - set(before), key=lambda file: file.stat().st_mtime_ns)
    if not new:
        raise LeftOutError("XLA wrote no sequence of thunks: it does so for GPUs, where --xla_dump_to is given")
    return read_thunks(new[-1].read_text())


def _dumps(folder: Path | None) -> list[Path]:
    return [] if folder is None else list(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))


def look(config: DecoderConfig, rows: int, attention: str | None, state: State) -> Found:
    """A decode step of a few layers, compiled and not run."""
    for name, step in state.steps.items():
        if attention is not None and step.get("values", {}).get("attn_implementation") == attention:
            raise LeftOutError(f"it is the same as {name!r}")
    folder = dump_folder(os.environ.get("XLA_FLAGS", ""))
    lm = random_model(config, "bfloat16")
    settings = ContinuousBatchingConfig(
        block_size=64, max_requests_per_batch=rows, max_batch_tokens=max(rows, 64), decode_buckets=(rows,),
        attn_implementation=attention, compilation_cache=False,
    )  # fmt: skip
    lm.compile_plan(settings, WorkloadHints(max_prompt_length=64, max_generated_length=64, num_requests=rows))
    session = lm.session
    assert session is not None
    before = _dumps(folder)
    program = session.device.compile(Bucket(kind="decode", rows=rows, tokens=rows))
    text = program.call.as_text() or ""
    used = {d.field: str(d.used) for d in session.resolved.decisions}["attn_implementation"]
    values = {
        "attn_implementation": used,
        "command buffers in the HLO": len(re.findall(r"^%command_buffer", text, re.M)),
    }
    figures = {"compile": report.spread([program.seconds], "s")}
    try:
        thunks = newest_thunks(folder, before)
    except LeftOutError as error:
        return Found(figures=figures, values=values, notes=(f"{used}: {error}",))
    finally:
        lm.close()
    figures |= {
        "command buffers": report.spread([float(thunks.buffers)], "in a program"),
        "launches in them": report.spread([thunks.share], "fraction"),
    }
    values |= {"inside": thunks.inside, "outside": thunks.outside, "loops": thunks.loops}
    return Found(figures=figures, values=values)


def steps(args: Namespace) -> list[Step]:
    """The attention that the engine takes, and the portable one."""
    config, rows = (TINY, 2) if args.dry_run else (replace(LLAMA_3_8B, num_layers=LAYERS), 64)
    wanted = [args.attention, *["xla"] * (args.attention != "xla")]
    return [
        Step(
            name=f"decode step of {rows} rows, attention {name or 'by default'}", run=partial(look, config, rows, name)
        )
        for name in wanted
    ]
