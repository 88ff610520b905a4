"""`cbjax replay`: goes through a recorded run again, step by step, with no model; or compares two."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbjax.cli.step_table import HEAD, line_of

if TYPE_CHECKING:
    from cbjax.recording import Recording, ReplayedStep

EXAMPLE = "example: cbjax replay run.cbjax"


def add_parser(commands: Any, name: str) -> None:
    """Adds the command to those of `ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        name,
        help="replay a recording through the scheduler alone, or compare two",
        description="Every step of a recorded run, planned again and compared with what was recorded. Recordings are "
        "made by `cbjax generate --record FILE` or `lm.record_to(FILE)`. Status 1 if a plan is another one than was "
        "recorded, or with --diff if there is a difference.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a recording")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", type=Path, metavar="OTHER", help="show the first input and the first step that differ")
    what.add_argument("--anonymise", type=Path, metavar="OUT", help="write it again with other token ids, same plans")
    what.add_argument("--quiet", action="store_true", help="no line for each step, only the summary")


def run(args: argparse.Namespace) -> int:
    """Runs it; 1 if there is a difference."""
    try:
        status = _run(args)
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 1


def _run(args: argparse.Namespace) -> int:
    from cbjax.recording import anonymise, compare, read_recording

    recording = _read(args.file)
    if args.diff is not None:
        found = compare(recording, _read(args.diff))
        print(found)
        return 1 if found else 0
    if args.anonymise is not None:
        if args.anonymise.exists() and args.anonymise.samefile(args.file):
            raise ValueError(f"--anonymise {args.anonymise}: that is the recording itself; name another file")
        anonymise(recording, args.anonymise)
        print(_summary(read_recording(args.anonymise), quiet=True))
        return 0
    print(_summary(recording, quiet=args.quiet))
    return 0


def _read(path: Path) -> Recording:
    from cbjax.recording import read_recording

    recording = read_recording(path)
    for note in recording.notes:
        print(f"cbjax: note: {note}", file=sys.stderr)
    return recording


def _summary(recording: Recording, *, quiet: bool) -> str:
    """Replays it, with a line for each step unless `quiet`."""
    from cbjax.recording import replay

    counts: Counter[str] = Counter(type(given).__name__ for given in recording.inputs)
    if not quiet:
        print(HEAD)
    for step in replay(recording):
        _count(step, counts)
        if not quiet:
            print(line_of(step))
    reasons = ", ".join(f"{counts[reason]} {reason}" for reason in ("stop", "length", "failed") if counts[reason])
    lines = {
        "steps": f"{counts['steps']}, {counts['rows']} rows; {counts['prefill']} tokens prefilled, "
        f"{counts['decode']} decoded",
        "requests": f"{counts['Add']} submitted, {counts['ended']} ended{f' ({reasons})' if reasons else ''}, "
        f"{counts['Cancel']} cancelled",
        "KV pressure": f"{counts['soft_resets']} soft resets, {counts['offloads']} offloads, "
        f"{counts['restores']} restores",
        "prefix cache": f"{counts['cached']} tokens found by {counts['admitted']} admissions",
        "engine": f"{counts['Start']} started, {counts['Reset']} aborted, {counts['Renew']} new weights",
        "replay": "every plan is the recorded one" if counts["steps"] else "no step to compare",
    }
    return "\n".join(f"{label:<14}{text}" for label, text in lines.items())


def _count(step: ReplayedStep, counts: Counter[str]) -> None:
    plan = step.plan
    decode = int(plan.batch.carried.sum())
    counts.update(steps=1, rows=plan.batch.num_rows, decode=decode, prefill=plan.batch.num_tokens - decode)
    counts.update(cached=sum(admission.num_cached for admission in plan.admitted))
    for name in ("admitted", "soft_resets", "offloads", "restores"):
        counts[name] += len(getattr(plan, name))
    if step.results is not None:
        counts["ended"] += len(step.results.ended)
        counts.update(ended.reason for ended in step.results.ended)
