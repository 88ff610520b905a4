"""Traces: token identity, slices, rates, files, and what is refused with which words."""

import json
from pathlib import Path

import numpy as np
import pytest

from cbjax.simulate import Trace, make_trace, read_trace

CSV = "arrival_s,prompt_tokens,output_tokens,shared_prefix_blocks_16\n0.0,5,2,0\n0.5,7,3,1\n0.5,1,1,0\n"


def shared() -> Trace:
    """Three prompts: the second begins like the first, the third has the same segment in another place."""
    return make_trace(
        [0.0, 1.0, 2.0],
        [8, 12, 9],
        [2, 3, 1],
        segments=[[(7, 5), (1, 3)], [(7, 5), (1, 3), (2, 4)], [(2, 4), (7, 5)]],
        output_ids=[50, -1, -2],
    )


def test_prompts_with_equal_segments_hold_equal_tokens_and_others_do_not() -> None:
    trace = shared()
    first, second, third = (trace.prompt(i) for i in range(3))
    assert [len(ids) for ids in (first, second, third)] == [8, 12, 9]
    assert first.dtype == np.int32
    assert first.min() >= 0
    assert np.array_equal(second[:8], first)
    assert np.array_equal(third[:4], second[8:])
    assert len(np.unique(np.concatenate([second, trace.prompt(0)[:0]]))) == 12  # ids of different places differ
    assert not np.array_equal(third[:4], first[:4])


def test_a_later_prompt_can_quote_what_a_request_generated() -> None:
    trace = make_trace([0, 1], [4, 10], [6, 1], segments=[[(1, 4)], [(1, 4), (50, 6)]], output_ids=[50, 51])
    generated = trace.outputs(np.zeros(6, np.int32), np.arange(6))
    assert np.array_equal(trace.prompt(1)[4:], generated)


def test_outputs_that_nobody_quotes_are_in_no_prompt() -> None:
    trace = make_trace([0.0] * 50, [40] * 50, [40] * 50)
    outputs = [trace.outputs(np.full(40, i), np.arange(40)) for i in range(50)]
    prompts = [trace.prompt(i) for i in range(50)]
    # Among 2**31 ids 4,000 draws collide with a probability of 0.4%; these do not.
    assert len(np.unique(np.concatenate(outputs + prompts))) == 4000


def test_tokens_stay_within_a_vocabulary_that_is_asked_for() -> None:
    trace = make_trace([0.0], [500], [100])
    for ids in (trace.prompt(0, vocab_size=13), trace.outputs(np.zeros(100, np.int32), np.arange(100), vocab_size=13)):
        assert set(ids.tolist()) <= set(range(13))
        assert len(set(ids.tolist())) == 13


def test_a_head_is_the_first_requests() -> None:
    trace, head = shared(), shared().head(2)
    assert len(head) == 2
    assert (head.span, trace.span) == (1.0, 2.0)
    for i in range(2):
        assert np.array_equal(head.prompt(i), trace.prompt(i))
    assert len(trace.head(99)) == 3
    assert trace.num_cells.tolist() == [9, 14, 9]
    with pytest.raises(ValueError, match="count must be at least 1; got 0"):
        trace.head(0)


def test_a_scaled_trace_keeps_its_rhythm() -> None:
    trace = make_trace([3.0, 4.0, 8.0], [1] * 3, [1] * 3).scaled(2.0)
    assert trace.arrival.tolist() == pytest.approx([0.0, 0.2, 1.0])
    with pytest.raises(ValueError, match="come at once cannot be scaled"):
        make_trace([0.0, 0.0], [1, 1], [1, 1]).scaled(2.0)
    with pytest.raises(ValueError, match="rate must be a positive number; got nan"):
        trace.scaled(float("nan"))


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    trace = make_trace(np.zeros(20_000), np.ones(20_000, int), np.ones(20_000, int))
    arrival = trace.with_poisson_arrivals(4.0, seed=1).arrival
    gaps = np.diff(arrival)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert np.array_equal(arrival, trace.with_poisson_arrivals(4.0, seed=1).arrival)
    assert not np.array_equal(arrival, trace.with_poisson_arrivals(4.0, seed=2).arrival)


def test_a_trace_cannot_be_written() -> None:
    trace = shared()
    for name in ("arrival", "prompt_tokens", "segment_ids"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(trace, name)[0] = 9


def test_csv_is_read_and_other_columns_are_not(tmp_path: Path) -> None:
    (tmp_path / "chat.csv").write_text(CSV)
    trace = read_trace(tmp_path / "chat.csv")
    assert trace.name == "chat"
    assert trace.arrival.tolist() == [0.0, 0.5, 0.5]
    assert trace.prompt_tokens.tolist() == [5, 7, 1]
    assert trace.output_tokens.tolist() == [2, 3, 1]
    prompts = np.concatenate([trace.prompt(i) for i in range(3)])
    assert len(np.unique(prompts)) == 13


def test_a_csv_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt_tokens,output_tokens,note,note,prompt_tokens\n5,2,,,7\n")
    with pytest.raises(ValueError, match="line 1: a column is there once; prompt_tokens found twice"):
        read_trace(tmp_path / "a.csv")


def test_csv_without_arrivals_comes_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffprompt_tokens, output_tokens\n5,2\n\n7,3\n", encoding="utf-8")
    trace = read_trace(tmp_path / "a.csv")
    assert trace.arrival.tolist() == [0.0, 0.0]
    assert trace.output_tokens.tolist() == [2, 3]


def test_json_lines_carry_the_identity_of_blocks(tmp_path: Path) -> None:
    rows = [[0, 10, 2, [3, 4, 5]], [1.5, 9, 1, [3, 4, 6]], [2, 3, 1]]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    trace = read_trace(tmp_path / "a.jsonl", segment_size=4)
    assert trace.arrival.tolist() == [0.0, 1.5, 2.0]
    first, second, third = (trace.prompt(i) for i in range(3))
    assert (len(first), len(second), len(third)) == (10, 9, 3)
    assert np.array_equal(first[:8], second[:8])
    assert first[8] != second[8]
    assert not set(third.tolist()) & set(first.tolist())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "line 1: the header.*prompt_tokens and output_tokens not found in \\[\\]"),
        ("a.csv", "arrival_s,prompt_tokens\n0,1\n", "line 1: .*output_tokens not found"),
        ("a.csv", "prompt_tokens,output_tokens\n", "at least one request; this file has none"),
        ("a.csv", "prompt_tokens,output_tokens\n5,2\n5,x\n", "line 3: output_tokens must be a whole number; got 'x'"),
        ("a.csv", "prompt_tokens,output_tokens\n5.5,2\n", "line 2: prompt_tokens must be a whole number; got '5.5'"),
        ("a.csv", "prompt_tokens,output_tokens\n5\n", "line 2: output_tokens must be a whole number; got 'nothing'"),
        ("a.csv", "prompt_tokens,output_tokens\n5,2\n-5,2\n", "line 3: prompt_tokens must be at least 1 .* got -5"),
        ("a.csv", "prompt_tokens,output_tokens\n5,0\n", "line 2: output_tokens must be at least 1 .* got 0"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\nnan,5,2\n", "line 2: an arrival must be a finite.*got nan"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,5,2\ninf,5,2\n", "line 3: an arrival .*got inf"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n-1,5,2\n", "line 2: an arrival .*at least 0; got -1"),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n1,5,2\n\n3,5,2\n2.5,5,2\n",
            "line 5: arrivals must be ascending; got 2.5, .*sort the requests",
        ),
        ("a.jsonl", "", "at least one request"),
        ("a.jsonl", "[0,5,2]\n{}\n", "line 2: a request is \\[arrival.*got {}"),
        ("a.jsonl", "[0,5,2,[1,\n", "line 1: a request is"),
        ("a.jsonl", "[0,5.5,2]\n", "line 1: a request is"),
        ("a.jsonl", "[0,true,2]\n", "line 1: a request is"),
        ("a.jsonl", "[0,5,2,[-1]]\n", "line 1: a request is"),
        ("a.jsonl", f"[{10**400},5,2]\n", "line 1: a request is"),
        ("a.jsonl", "[" * 100_000, "line 1: a request is"),
        ("a.csv", f"prompt_tokens,output_tokens\n{'5' * 200_000},2\n", "is CSV; this one is not"),
        ("a.jsonl", "[NaN,5,2]\n", "line 1: an arrival must be a finite"),
        ("a.jsonl", "[0,5,2,[1]]\n[0,600,2,[1]]\n", "line 2: a prompt of 600 tokens has 2 blocks of 512; got 1"),
        ("a.jsonl", f"[0,{2**70},2]\n", "line 1: prompt_tokens must be .*below"),
    ],
)
def test_a_bad_file_is_refused_with_rule_value_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(tmp_path / name)
    assert name in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="text file in UTF-8"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": [], "arrival": [], "output_tokens": []}, "at least one request; got none"),
        ({"arrival": [0.0]}, "arrival must have one entry per request, 2; got 1"),
        ({"arrival": [1.0, 0.5]}, "request 1: arrivals must be ascending"),
        ({"output_tokens": [1, 0]}, "request 1: output_tokens must be at least 1"),
        ({"output_tokens": [1.5, 2.0]}, "output_tokens must be whole numbers; got float64"),
        ({"segments": [[(1, 3)], [(1, 3)]]}, "request 0: its segments do not add up to its 5 tokens"),
        ({"segments": [[(1, 5)], []]}, "at least one segment"),
        ({"segments": [[(1, 6), (2, -1)], [(1, 7)]]}, "a segment has at least one token; got -1"),
    ],
)
def test_a_bad_trace_is_refused(changes: dict, message: str) -> None:
    good = {"arrival": [0.0, 1.0], "prompt_tokens": [5, 7], "output_tokens": [2, 3]}
    make_trace(**good)
    with pytest.raises(ValueError, match=message):
        make_trace(**(good | changes))
