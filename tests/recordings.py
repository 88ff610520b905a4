"""Recordings for tests: one of everything, those of 100 random runs, and how to change one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from machines import make_config
from recorded_runs import Run, random_run

from cbjax.recording import (
    Add,
    Cancel,
    Input,
    Recording,
    RecordingWriter,
    Renew,
    Reset,
    Schedule,
    Start,
    Update,
    read_recording,
)
from cbjax.recording.compare import differences
from cbjax.recording.player import Player
from cbjax.scheduler import EVICTION_MAPPING, Request, StepOutputs, StepPlan

NUM_RUNS = 100


def values(ids: Sequence[int], dtype: type = np.int32) -> np.ndarray:
    """A 1-D array."""
    return np.array(ids, dtype)


REQUEST = Request(
    uid=7,
    prompt=values([0, 255, 256, 70_000, 2**31 - 1]),
    max_new_tokens=12,
    eos_token_ids=(2, 128_001),
    words=values([0, 2**32 - 1], np.uint32),
    namespace=b"\x00salt\xff",
    fork_of=3,
)
INPUTS = (
    Start(config=make_config(windows=(None, 6), policy="prefill_first", safety_margin=0.1, shares_blocks=True)),
    Add(request=REQUEST),
    Add(request=replace(REQUEST, uid=8, prompt=values([1]), eos_token_ids=(), namespace=b"", fork_of=None)),
    Schedule(digest="0123456789abcdef"),
    Schedule(),
    Schedule(digest="fedcba9876543210", max_window=16),
    Update(tokens=values([3, 0, 200]), finite=None),
    Update(tokens=values([-1, 65_536]), finite=values([True, False], bool)),
    Update(tokens=values([]), finite=None),
    Cancel(uid=8),
    Renew(),
    Reset(),
    Start(config=make_config(eviction=EVICTION_MAPPING["lifo"], host_blocks=3)),
)


def write(path: Path, inputs: Iterable[Input] = INPUTS, *, is_complete: bool = True) -> Path:
    """Makes the file of these inputs."""
    writer = RecordingWriter(path)
    for given in inputs:
        writer(given)
    writer.close(is_complete=is_complete)
    return path


def assert_same(found: Sequence[Input], expected: Sequence[Input]) -> None:
    """Equal in every field."""
    assert len(found) == len(expected)
    for i, (one, another) in enumerate(zip(found, expected, strict=True)):
        assert list(differences(one, another, str(i))) == []


@functools.cache
def recorded(seed: int) -> tuple[Run, Recording]:
    """A random run, and what the file that it left holds."""
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordingWriter(Path(folder, "run.cbjax"))
        run = random_run(seed, writer)
        writer.close()
        return run, replace(read_recording(Path(folder, "run.cbjax")), name=f"run {seed}")


def of(inputs: Iterable[Input], name: str = "edited") -> Recording:
    """As if read from a file."""
    return Recording(name=name, made_by="0", inputs=tuple(inputs))


def without(recording: Recording, i: int) -> Recording:
    """One input is taken out."""
    return of(given for j, given in enumerate(recording.inputs) if j != i)


def changed(recording: Recording, i: int, given: Input) -> Recording:
    """One input is another."""
    return of([*recording.inputs[:i], given, *recording.inputs[i + 1 :]])


def answers(tokens: Sequence[int]) -> StepOutputs:
    """What a device says, row by row."""
    rows = len(tokens)
    return StepOutputs(
        tokens=np.array([tokens], np.int32), logprobs=np.zeros((1, rows), np.float32), finite=np.ones((1, rows), bool)
    )


def plans_of(recording: Recording) -> Iterator[StepPlan]:
    """Of every `Schedule`, empty ones, too; recorded digests play no part."""
    player = Player()
    for given in recording.inputs:
        answer = player.apply(given)
        if isinstance(answer, StepPlan):
            yield answer


def first_other_plan(recording: Recording, edited: Recording) -> int | None:
    """The first step at which the scheduler plans otherwise, field by field; None if it never does."""
    step = 0
    for plan, other in zip(plans_of(recording), plans_of(edited), strict=True):
        if list(differences(plan, other, "plan")):
            return step
        step += not plan.is_empty
    return None
