"""Workload models: the published statistics they are fitted to, and what their prompts have in common."""

import hashlib

import numpy as np
import pytest

from cbjax.simulate import WORKLOADS, Trace, workload_named
from cbjax.simulate.quantiles import Quantiles, correlated

# Statistics of the whole sources: prompts' median, 90% and mean, outputs' median, 90% and mean. Azure LLM inference
# trace 2023 (CC-BY-4.0), ServeGen and Mooncake (Apache-2.0).
SOURCES = {
    "chat": ((1020, 2734.5, 1154.7), (129, 424, 211.1)),
    "code": ((1469, 5187.6, 2047.8), (13, 55, 27.9)),
    "reasoning": ((208, 2092, 1268.2), (792, 3432, 1527.4)),
    "agents": ((6909, 27_367, 12_035.1), (350, 597, 342.6)),
}
QUESTIONS = ((40, 322, 119.7), (3, 44, 14.9))  # ServeGen m-small, few_shot's


def figures(lengths: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(lengths)), float(np.quantile(lengths, 0.9)), float(lengths.mean())


@pytest.mark.parametrize("name", SOURCES)
def test_lengths_are_those_of_the_source(name: str) -> None:
    trace = workload_named(name).sample(40_000, rate=3.0, seed=0)
    for lengths, (median, p90, mean) in zip((trace.prompt_tokens, trace.output_tokens), SOURCES[name], strict=True):
        found = figures(lengths)
        assert found[0] == pytest.approx(median, rel=0.05)
        assert found[1] == pytest.approx(p90, rel=0.08)
        assert found[2] == pytest.approx(mean, rel=0.12)


def test_few_shot_questions_and_answers_are_those_of_the_source() -> None:
    trace = workload_named("few_shot").sample(40_000, seed=0)
    questions = trace.segment_tokens[1::2]
    for lengths, (median, p90, mean) in zip((questions, trace.output_tokens), QUESTIONS, strict=True):
        found = figures(lengths)
        assert found == (pytest.approx(median, abs=1), pytest.approx(p90, rel=0.08), pytest.approx(mean, rel=0.12))


def found_again(trace: Trace, block_size: int) -> float:
    """Fraction of prompt tokens in blocks that an endless cache has seen, with equal blocks before them."""
    seen: set[bytes] = set()
    hits = 0
    for i in range(len(trace)):
        ids, key, is_known = trace.prompt(i), b"", True
        for start in range(0, len(ids) - block_size + 1, block_size):
            key = hashlib.blake2b(key + ids[start : start + block_size].tobytes(), digest_size=16).digest()
            is_known = is_known and key in seen
            hits += block_size * is_known
            seen.add(key)
    return hits / int(trace.prompt_tokens.sum())


def test_agents_find_as_much_again_as_the_source() -> None:
    trace = workload_named("agents").sample(6000, rate=3.4, seed=0)
    assert found_again(trace, 512) == pytest.approx(0.374, abs=0.04)
    assert found_again(workload_named("chat").sample(500, seed=0), 16) == 0.0


def test_agents_begin_with_one_system_prompt_and_quote_their_history() -> None:
    trace = workload_named("agents").sample(3000, rate=3.0, seed=1)
    start = trace.prompt(0)[:880]
    by_output = {int(output): i for i, output in enumerate(trace.output_ids)}
    later = 0
    for i in range(0, 3000, 7):
        ids = trace.prompt(i)
        assert np.array_equal(ids[:880], start)
        own = trace.segment_ids[trace.offsets[i] : trace.offsets[i + 1]]
        if len(own) > 2:
            before = by_output[int(own[-2])]
            assert trace.arrival[before] < trace.arrival[i]
            known = len(trace.prompt(before))
            assert np.array_equal(ids[:known], trace.prompt(before))
            answer = int(trace.output_tokens[before])
            generated = trace.outputs(np.full(answer, before), np.arange(answer))
            assert np.array_equal(ids[known : known + answer], generated)
            later += 1
    assert later > 100


def test_few_shot_prompts_begin_with_their_tasks_examples() -> None:
    trace = workload_named("few_shot").sample(2000, seed=0)
    tasks = trace.segment_ids[::2]
    assert len(np.unique(tasks)) == 57
    same = np.flatnonzero(tasks == tasks[0])
    header = int(trace.segment_tokens[0])
    for i in same[:5]:
        assert np.array_equal(trace.prompt(int(i))[:header], trace.prompt(0)[:header])
    assert not np.array_equal(trace.prompt(int(same[1]))[header:], trace.prompt(0)[header:])


@pytest.mark.parametrize("name", WORKLOADS)
def test_samples_have_the_rate_and_depend_on_the_seed_alone(name: str) -> None:
    workload = workload_named(name)
    assert workload.name == name
    trace, again, other = (workload.sample(20_000, rate=7.0, seed=seed) for seed in (3, 3, 4))
    assert len(trace) == 20_000
    # Bursts of code requests and sessions that have only begun take long to even out.
    assert len(trace) / trace.span == pytest.approx(7.0, rel=0.25 if name == "code" else 0.1)
    for field in ("arrival", "prompt_tokens", "segment_ids", "output_tokens"):
        assert np.array_equal(getattr(trace, field), getattr(again, field))
    assert not np.array_equal(trace.prompt_tokens, other.prompt_tokens)
    assert (np.diff(trace.arrival) >= 0).all()


def test_without_a_rate_independent_requests_come_at_once() -> None:
    assert not workload_named("chat").sample(50).arrival.any()
    for count, rate in ((0, None), (5, 0.0), (5, -1.0)):
        with pytest.raises(ValueError, match=r"(num_requests|rate) must be"):
            workload_named("chat").sample(count, rate=rate)
    with pytest.raises(ValueError, match=r"one of \['agents', 'chat'.*got 'chatter'"):
        workload_named("chatter")


def test_quantiles_are_interpolated_in_the_logarithm_and_their_mean_is_exact() -> None:
    table = Quantiles(((0, 1), (0.5, 10), (1, 1000)))
    assert table.at(np.array([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == pytest.approx([1, 10**0.5, 10, 100, 1000])
    fine = table.at((np.arange(200_000) + 0.5) / 200_000)
    assert table.mean == pytest.approx(fine.mean(), rel=1e-4)
    assert Quantiles(((0, 2), (1, 2))).mean == pytest.approx(2)
    for points in (((0, 1),), ((0, 1), (0.9, 2)), ((0, 2), (1, 1)), ((0, 0), (1, 1)), ((0, 1), (0, 2), (1, 3))):
        with pytest.raises(ValueError, match="quantiles are"):
            Quantiles(points)


def test_coupled_variables_are_uniform_and_correlated() -> None:
    def ranks(values: np.ndarray) -> np.ndarray:
        return np.argsort(np.argsort(values))

    for theta, wanted in ((0.0, 0.0), (1.15, 0.19), (6.0, 0.72)):
        first, second = correlated(np.random.default_rng(0), 50_000, theta)
        for uniform in (first, second):
            assert np.quantile(uniform, [0.1, 0.5, 0.9]).tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.01)
        assert np.corrcoef(ranks(first), ranks(second))[0, 1] == pytest.approx(wanted, abs=0.03)
