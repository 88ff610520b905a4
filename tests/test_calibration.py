"""Steps of the engine, measured, and a predicted run. The example in docs/sizing.md measures a whole ladder."""

import time
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.prediction import num_different, predict, ragged, run_engine
from cbjax import ContinuousBatchingConfig, GenerationConfig, measure_cost, measure_steps
from cbjax.simulate import StepWork, fit_cost
from cbjax.testing import tiny_llama

# Two programs: decodes run in a mixed one, too.
BATCHING = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=24,
    max_blocks_per_request=0,
    max_batch_tokens=32,
    max_requests_per_batch=8,
    safety_margin=0.0,
    use_async_batching=False,
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama()
    yield model
    model.close()


@pytest.mark.parametrize("space", [0.0, 0.01])
def test_every_batch_of_a_run_under_pressure_is_predicted(lm, space):
    trace = ragged(16, prompt=(4, 30), output=(4, 40), seed=3)
    run = run_engine(lm, trace, ContinuousBatchingConfig(**settings(cpu_offload_space=space)))
    assert run.evictions > 3
    cost = fit_cost(run.steps)
    batches, seconds = predict(trace, run, cost)
    assert len(batches) == len(run.batches) > 100
    assert num_different(batches, run.batches) == 0
    # The fit was made of these very steps: no statement on how well another run's time is predicted.
    assert 0 < seconds < np.inf
    assert (cost.offloaded + cost.restored > 0) <= (space > 0)
    other = ragged(16, prompt=(4, 30), output=(4, 40), seed=4)
    assert num_different(predict(other, run, cost)[0], run.batches) > 100


def settings(**changes):
    return {name: getattr(BATCHING, name) for name in BATCHING.__slots__} | changes


def test_the_steps_of_a_run_add_up_to_its_time(lm):
    prompts, asked = [[5, 6, 7], [8], [9, 10]], GenerationConfig(max_new_tokens=12, eos_token_id=-1)
    lm.generate_batch(prompts, asked, BATCHING)
    with lm.recording() as records, measure_steps(lm) as steps:
        assert steps == []
        began = time.perf_counter()
        lm.generate_batch(prompts, asked, BATCHING)
        lm.generate_batch(prompts[:1], asked, BATCHING)
        seconds = time.perf_counter() - began
    assert lm.observers == []
    # Neither the last step of a call nor what lies between two calls is measured.
    first, second = records[:12], records[12:]
    expected = [(r, s.dispatched - r.dispatched) for run in (first, second) for r, s in pairwise(run)]
    assert [(step.work, step.seconds) for step in steps] == [
        (StepWork.of(record.plan, record.bucket), between) for record, between in expected
    ]
    assert len(steps) == 22
    assert sum(step.seconds for step in steps) < seconds


def test_a_cost_cannot_be_measured_without_repeats_or_room(lm):
    with pytest.raises(ValueError, match="repeats must be at least 1; got 0"):
        measure_cost(lm, BATCHING, repeats=0)
    tiny = ContinuousBatchingConfig(**settings(num_blocks=2))
    with pytest.raises(ValueError, match="room for 8 new tokens beside its prompt; it has 8"):
        measure_cost(lm, tiny)
    assert lm.manager is None
