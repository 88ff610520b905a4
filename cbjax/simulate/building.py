"""Making a trace from what a caller has, with every rule of `Trace` checked: here, once, for all who make one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from cbjax.simulate.trace import Trace, frozen


def make_trace(
    arrival: Sequence[float] | np.ndarray,
    prompt_tokens: Sequence[int] | np.ndarray,
    output_tokens: Sequence[int] | np.ndarray,
    *,
    segments: Sequence[Sequence[tuple[int, int]]] | None = None,
    output_ids: Sequence[int] | np.ndarray | None = None,
    name: str = "trace",
) -> Trace:
    """A trace of these requests.

    Args:
      segments: (id, tokens) of each prompt's segments; None: no two prompts have anything in common.
      output_ids: of the segments that the outputs are; None: nobody quotes them.

    Raises:
      ValueError: there are none, or one breaks a rule of `Trace`.
    """
    n = len(prompt_tokens)
    if segments is None:
        sizes, ids, tokens = np.ones(n, np.int64), np.arange(n), np.array(prompt_tokens)
    else:
        sizes = np.array([len(own) for own in segments], np.int64)
        pairs = np.array(list(chain.from_iterable(segments)), np.int64).reshape(-1, 2)
        ids, tokens = pairs.T
    return trace_of_arrays(
        name=name,
        arrival=np.asarray(arrival, np.float64),
        prompt_tokens=np.asarray(prompt_tokens),
        output_tokens=np.asarray(output_tokens),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        segment_ids=ids,
        segment_tokens=tokens,
        output_ids=-1 - np.arange(n) if output_ids is None else np.asarray(output_ids),
    )


def trace_of_arrays(name: str, **arrays: np.ndarray) -> Trace:
    """`make_trace` for one that has `Trace`'s arrays already."""
    n = len(arrays["prompt_tokens"])
    if not n:
        raise ValueError("a trace has at least one request; got none")
    for field in ("prompt_tokens", "output_tokens", "segment_ids", "segment_tokens", "output_ids"):
        if not np.issubdtype(arrays[field].dtype, np.integer):
            raise ValueError(f"{field} must be whole numbers; got {arrays[field].dtype}")
    for field in ("arrival", "output_tokens", "output_ids"):
        if len(arrays[field]) != n:
            raise ValueError(f"{field} must have one entry per request, {n}; got {len(arrays[field])}")
    problem = first_problem(arrays["arrival"], arrays["prompt_tokens"], arrays["output_tokens"])
    if problem is not None:
        raise ValueError(f"request {problem[0]}: {problem[1]}")
    _check_segments(arrays["prompt_tokens"], arrays["offsets"], arrays["segment_tokens"])
    dtypes = {"arrival": np.float64, "offsets": np.int64, "segment_ids": np.int64, "output_ids": np.int64}
    return Trace(name=name, **{field: frozen(array, dtypes.get(field, np.int32)) for field, array in arrays.items()})


def first_problem(arrival: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> tuple[int, str] | None:
    """The first request that breaks a rule, and which; None if all are sound."""
    late = np.concatenate([[False], arrival[1:] < arrival[:-1]])
    checks = (
        (prompt_tokens, _no_length(prompt_tokens), "prompt_tokens must be at least 1 and below 2**31; got {}"),
        (output_tokens, _no_length(output_tokens), "output_tokens must be at least 1 and below 2**31; got {}"),
        (
            arrival,
            ~(np.isfinite(arrival) & (arrival >= 0)),
            "an arrival must be a finite number of seconds, at least 0; got {}",
        ),
        (arrival, late, "arrivals must be ascending; got {}, which is before the request above it: sort the requests"),
    )
    firsts = [(int(np.argmax(wrong)), values, rule) for values, wrong, rule in checks if wrong.any()]
    found = [(first, rule.format(values[first])) for first, values, rule in firsts]
    return min(found, key=lambda problem: problem[0], default=None)


def _check_segments(prompt_tokens: np.ndarray, offsets: np.ndarray, segment_tokens: np.ndarray) -> None:
    n = len(prompt_tokens)
    if len(offsets) != n + 1 or (np.diff(offsets) < 1).any() or offsets[-1] != len(segment_tokens):
        raise ValueError(f"each of the {n} prompts must have at least one segment")
    if (segment_tokens < 1).any():
        raise ValueError(f"a segment has at least one token; got {segment_tokens[segment_tokens < 1][0]}")
    wrong = np.flatnonzero(np.add.reduceat(segment_tokens.astype(np.int64), offsets[:-1]) != prompt_tokens)
    if len(wrong):
        raise ValueError(f"request {wrong[0]}: its segments do not add up to its {prompt_tokens[wrong[0]]} tokens")


def _no_length(tokens: np.ndarray) -> np.ndarray:
    return (tokens < 1) | (tokens >= 2**31)
