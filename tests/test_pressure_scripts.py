"""Random scripts on real models: arrivals, cancels, forks, prefixes, offloads and soft resets, one session for all."""

import random

import numpy as np
import pytest
from pressed_models import NAMES, make

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig, RequestStatus
from cbjax.requests import RequestState
from cbjax.sampling import SamplingParams
from cbjax.scheduler import check

COMMON = {"block_size": 4, "max_batch_tokens": 64, "max_requests_per_batch": 8, "return_logprobs": True}


@pytest.fixture(scope="module", params=NAMES)
def models(request):
    """The same weights twice: pressed for room, and with room for everybody and no sharing."""
    tight, huge = make(request.param), make(request.param)
    num_blocks, host_blocks = (11, 14) if request.param == "llama" else (15, 11)
    pressed = ContinuousBatchingConfig(
        **COMMON,
        num_blocks=num_blocks,
        max_blocks_per_request=9,
        safety_margin=0.0,
        cpu_offload_space=host_blocks * 1024 / 2**30,
        compilation_cache=False,
    )
    tight.generate_batch([[1, 2]], GenerationConfig(max_new_tokens=2), pressed)
    assert tight.session is not None
    assert tight.session.resolved.host_blocks == host_blocks
    yield tight, huge
    tight.close()
    huge.close()


class Script:
    """Drives the engine of a session; what ended is compared later."""

    def __init__(self, lm: CausalLM, seed: int) -> None:
        assert lm.session is not None
        self.engine, self.rng = lm.session.engine, random.Random(seed)
        self.texts = [[self.rng.randrange(258) for _ in range(24)] for _ in range(2)]
        self.requests: list[tuple[RequestState, SamplingParams]] = []
        self.evictions = 0

    def run(self) -> None:
        to_come = self.rng.randint(4, 9)
        while to_come or not self.engine.is_idle:
            if to_come and self.rng.random() < 0.5:
                self._submit()
                to_come -= 1
            if self.requests and self.rng.random() < 0.04:
                self.engine.cancel(self.rng.choice(self.requests)[0].request_id)
            self.engine.step()
            check(self.engine.state)
        pool = self.engine.state.pool
        assert pool.num_blank + pool.num_cached == self.engine.state.config.num_blocks
        assert not len(pool.holders)
        assert self.engine.state.host_used == 0

    def _submit(self) -> None:
        rng, parent = self.rng, None
        common = rng.choice([0, 5, 12, 20])
        prompt = rng.choice(self.texts)[:common] + [rng.randrange(258) for _ in range(rng.randint(1, 6))]
        new_tokens = rng.randint(1, min(16, 36 - len(prompt) + 1))
        for _ in range(rng.choice([1, 1, 1, 3])):
            hot = rng.random() < 0.5
            settings = {"do_sample": True, "temperature": 0.9, "top_k": 40} if hot else {}
            sampling = SamplingParams(**settings, seed=rng.randrange(2**31), logprobs=True)
            state = self.engine.submit(
                f"r{len(self.requests)}",
                prompt,
                max_new_tokens=new_tokens,
                eos_token_ids=(),
                sampling=sampling,
                fork_of=parent,
            )
            self.requests.append((state, sampling))
            parent = parent or state


def verify(scripts: list[Script], huge: CausalLM) -> None:
    """Tokens and logprobs of every request are those of the same request where nobody lacks anything."""
    everything = [pair for script in scripts for pair in script.requests]
    configs = [
        GenerationConfig(
            max_new_tokens=state.max_new_tokens,
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=sampling.seed,
            eos_token_id=-1,
        )
        for state, sampling in everything
    ]
    room = ContinuousBatchingConfig(**COMMON, num_blocks=256, allow_block_sharing=False, compilation_cache=False)
    right = huge.generate_batch([state.prompt for state, _ in everything], configs, room)
    assert huge.summary is not None
    assert huge.summary.soft_resets == 0
    for (state, _), output in zip(everything, right.values(), strict=True):
        count = len(state.generated_tokens)
        assert state.generated_tokens == output.generated_tokens[:count]
        np.testing.assert_allclose(state.logprobs, output.logprobs[:count], atol=1e-5)
        assert state.status == RequestStatus.CANCELLED or count == state.max_new_tokens


def run_scripts(models, seeds: range) -> None:
    tight, huge = models
    assert tight.session is not None
    stats = tight.session.engine.stats
    before = stats.soft_resets, stats.offloads, stats.cached_tokens
    scripts = [Script(tight, seed) for seed in seeds]
    for script in scripts:
        script.run()
    verify(scripts, huge)
    after = stats.soft_resets, stats.offloads, stats.cached_tokens
    assert all(a > b for a, b in zip(after, before, strict=True)), "no soft reset, no offload or nothing found"


@pytest.mark.slow
def test_invariant_4_many_random_scripts_on_real_models_equal_runs_with_room(models) -> None:
    run_scripts(models, range(1000, 1220))
