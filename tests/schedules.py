"""The same requests under random schedules, compared by the bits of their tokens and logprobs.

A schedule is an order of arrival, gaps between arrivals, strangers that come and are cancelled, and a config. The
requests have everything that could make a difference: prompts that begin alike, prompts longer than a chunk,
continuations that fork, greedy and sampled ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbjax import ContinuousBatchingConfig, RequestStatus, WorkloadHints
from cbjax.causal_lm import CausalLM
from cbjax.engine import Engine
from cbjax.requests import RequestState
from cbjax.sampling import SamplingParams
from cbjax.session import Session

# Tokens with which every other prompt begins, and of the rest of most prompts at most.
_SHARED, _OWN = 40, 24

type Bits = tuple[tuple[int, ...], bytes]

_SAMPLING = (
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    {"do_sample": True, "top_k": 20},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request; `family` is shared by the continuations of a prompt."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    sampling: SamplingParams
    family: int


def make_jobs(count: int, *, vocab_size: int, longest: int, new_tokens: int) -> list[Job]:
    """`count` requests, some with prompts of `longest` tokens; the same ones every time."""
    rng = random.Random(longest)
    shared = [rng.randrange(vocab_size) for _ in range(_SHARED)]
    jobs: list[Job] = []
    for i in range(count):
        length = longest - _SHARED if i % 8 == 3 else rng.randint(1, _OWN)
        own = [rng.randrange(vocab_size) for _ in range(length)]
        prompt = jobs[-1].prompt if i % 6 == 5 else (*shared, *own) if i % 2 else tuple(own)
        jobs.append(
            Job(
                name=f"r{i}",
                prompt=prompt,
                new_tokens=rng.randint(new_tokens // 2, new_tokens),
                sampling=SamplingParams(logprobs=True, seed=i, **_SAMPLING[i % len(_SAMPLING)]),
                family=i - 1 if i % 6 == 5 else i,
            )
        )
    return jobs


def session_of(lm: CausalLM, **settings) -> Session:
    """A batch-invariant session that is warm."""
    session = Session(lm, ContinuousBatchingConfig(batch_invariant=True, **settings), WorkloadHints())
    session.warmup()
    return session


def run_alone(engine: Engine, jobs: Sequence[Job]) -> dict[str, Bits]:
    """Each request when nobody else is there."""
    return {job.name: _bits(_finish(engine, [_submit(engine, job, None)])[0]) for job in jobs}


def run_together(engine: Engine, jobs: Sequence[Job], seed: int) -> dict[str, Bits]:
    """All requests under the schedule of that seed."""
    rng = random.Random(seed)
    waiting = rng.sample(jobs, len(jobs))
    most = rng.choice((1, 4, len(jobs)))  # that come before the same step
    states: list[RequestState] = []
    strangers: list[str] = []
    first: dict[int, RequestState] = {}
    while waiting:
        for job in [waiting.pop() for _ in range(min(rng.randint(0, most), len(waiting)))]:
            mate = first.get(job.family)
            alive = mate is not None and mate.status < RequestStatus.FINISHED
            state = _submit(engine, job, mate if alive else None)
            states.append(state)
            first.setdefault(job.family, state)
        if rng.random() < 0.2:
            strangers.append(f"stranger{len(strangers)}")
            prompt = [rng.randrange(engine.vocab_size) for _ in range(rng.randint(1, 20))]
            sampling = SamplingParams(do_sample=rng.random() < 0.5)
            engine.submit(strangers[-1], prompt, max_new_tokens=10, eos_token_ids=(), sampling=sampling)
        if strangers and rng.random() < 0.2:
            engine.cancel(strangers.pop())
        engine.step()
    return {state.request_id: _bits(state) for state in _finish(engine, states)}


def different(results: dict[str, Bits], right: dict[str, Bits]) -> Counter[str]:
    """What differs, with the number of requests in which it does; names that are missing count."""
    found: Counter[str] = Counter(missing=len(results.keys() ^ right.keys()))
    for name, (tokens, logprobs) in results.items():
        found["tokens"] += tokens != right[name][0]
        found["logprobs"] += logprobs != right[name][1]
    return +found


def _submit(engine: Engine, job: Job, fork_of: RequestState | None) -> RequestState:
    return engine.submit(
        job.name,
        job.prompt,
        max_new_tokens=job.new_tokens,
        eos_token_ids=(),
        sampling=job.sampling,
        fork_of=fork_of,
    )


def _finish(engine: Engine, states: list[RequestState]) -> list[RequestState]:
    while not engine.is_idle:
        engine.step()
    assert all(state.status == RequestStatus.FINISHED for state in states)
    return states


def _bits(state: RequestState) -> Bits:
    assert len(state.generated_tokens) == len(state.logprobs) == state.max_new_tokens
    return tuple(state.generated_tokens), np.array(state.logprobs, np.float64).tobytes()
