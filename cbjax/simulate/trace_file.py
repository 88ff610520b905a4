"""Traces in files: CSV with a header, or JSON lines with the identity of prompt blocks."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cbjax.simulate.building import first_problem, trace_of_arrays
from cbjax.simulate.trace import Trace

NEEDED = ("prompt_tokens", "output_tokens")


def read_trace(path: str | Path, *, segment_size: int = 512) -> Trace:
    """Reads a trace.

    A `.jsonl` file has one list a line: arrival in seconds, prompt tokens, output tokens and, if prompts begin alike,
    the ids of the prompt's blocks of `segment_size` tokens, of which the last may be partly filled. Anything else is
    CSV with a header; `arrival_s` (without it all come at once), `prompt_tokens` and `output_tokens` are read, other
    columns are not.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is none of these, or a line breaks a rule; with the number of the line.
    """
    path = Path(path)
    if segment_size < 1:
        raise ValueError(f"segment_size must be at least 1 token; got {segment_size}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = list(_json_rows(file) if path.suffix == ".jsonl" else _csv_rows(file))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: a trace is a text file in UTF-8; this one is not ({error.reason})") from None
        except csv.Error as error:
            raise ValueError(f"{path}: a trace that is not .jsonl is CSV; this one is not ({error})") from None
        except ValueError as error:
            raise ValueError(f"{path}, {error}") from None
    if not rows:
        raise ValueError(f"{path}: a trace has at least one request; this file has none")
    lines, arrival, prompt, output, ids = zip(*rows, strict=True)
    arrival, prompt, output = np.array(arrival, np.float64), _lengths(prompt), _lengths(output)
    problem = first_problem(arrival, prompt, output)
    if problem is not None:
        raise ValueError(f"{path}, line {lines[problem[0]]}: {problem[1]}")
    return _trace(path, lines, arrival, prompt, output, ids, segment_size)


def _trace(path: Path, lines, arrival, prompt, output, ids, segment_size: int) -> Trace:
    """The trace of what was read; `ids` are each prompt's block ids or None."""
    n = len(prompt)
    # Prompts without ids have nothing in common with any other.
    fresh = 1 + max((max(own, default=0) for own in ids if own is not None), default=-1)
    sizes, segment_ids, segment_tokens = [], [], []
    for i, own in enumerate(ids):
        tokens = int(prompt[i])
        if own is None:
            sizes.append(1)
            segment_ids.append(fresh + i)
            segment_tokens.append(tokens)
            continue
        whole, rest = divmod(tokens, segment_size)
        if len(own) != whole + (rest > 0):
            raise ValueError(
                f"{path}, line {lines[i]}: a prompt of {tokens} tokens has {whole + (rest > 0)} blocks of "
                f"{segment_size}; got {len(own)} block ids (segment_size says how many tokens an id stands for)"
            )
        sizes.append(len(own))
        segment_ids += own
        segment_tokens += [segment_size] * whole + [rest] * (rest > 0)
    return trace_of_arrays(
        path.stem,
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        segment_ids=np.array(segment_ids, np.int64),
        segment_tokens=np.array(segment_tokens),
        output_ids=-1 - np.arange(n),
    )


# (line, arrival, prompt tokens, output tokens, block ids)
type _Row = tuple[int, float, int, int, list[int] | None]


def _csv_rows(file) -> Iterator[_Row]:
    reader = csv.DictReader(file, skipinitialspace=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    if doubled := {name for name in header if name in (*NEEDED, "arrival_s") and header.count(name) > 1}:
        raise ValueError(f"line 1: a column is there once; {' and '.join(sorted(doubled))} found twice in {header}")
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise ValueError(
            f"line 1: the header of a trace names the columns {', '.join(NEEDED)} (and arrival_s, in seconds, if they "
            f"do not come at once); {' and '.join(missing)} not found in {header}"
        )
    for row in reader:
        line = reader.line_num
        arrival = _number(line, "arrival_s", row["arrival_s"], float) if "arrival_s" in header else 0.0
        prompt, output = (_number(line, name, row[name], int) for name in NEEDED)
        yield line, arrival, prompt, output, None


def _number(line: int, name: str, text: str | None, kind: type) -> Any:
    try:
        return kind(text or "")
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"line {line}: {name} must be {what}; got {text or 'nothing'!r}") from None


def _json_rows(file) -> Iterator[_Row]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        request = _request(text)
        if request is None:
            raise ValueError(
                f"line {line}: a request is [arrival in seconds, prompt tokens, output tokens, [block ids]], ids being "
                f"whole numbers, at least 0, or left out; got {text.strip():.80}"
            )
        yield line, *request


def _request(text: str) -> tuple[float, int, int, list[int] | None] | None:
    """What a line says, or None if that is no request."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, list) or len(row) not in (3, 4):
        return None
    arrival, prompt, output = row[:3]
    ids = row[3] if len(row) == 4 else None
    is_number = type(arrival) is float or (type(arrival) is int and abs(arrival) < 2**63)
    if not is_number or type(prompt) is not int or type(output) is not int:
        return None
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**62 for i in ids)):
        return None
    return float(arrival), prompt, output, ids


def _lengths(values) -> np.ndarray:
    """i64, what is out of any range as -1 or 2**31 so that it is reported as wrong."""
    return np.array([min(max(value, -(2**31)), 2**31) for value in values], np.int64)
