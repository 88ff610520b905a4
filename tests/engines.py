"""The real engine on the history-hash device, and what its tests do with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from machines import VOCAB_SIZE, make_config, make_device, make_prompt

from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.requests import RequestState
from cbjax.sampling import NUM_WORDS, SamplingParams
from cbjax.testing import solo_run

GREEDY = SamplingParams()


def make_engine(*, depth: int = 0, max_positions: int = 4096, **changes) -> Engine:
    """The engine over a history-hash device."""
    config = make_config(num_words=NUM_WORDS, **changes)
    device = make_device(config)
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    return Engine(device, config, ladder, vocab_size=VOCAB_SIZE, max_positions=max_positions, depth=depth)


def submit(
    engine: Engine,
    name: str,
    prompt: int | Sequence[int] | np.ndarray,
    max_new_tokens: int | None = 6,
    eos: tuple[int, ...] = (),
    sampling: SamplingParams = GREEDY,
) -> RequestState:
    """Submits to an engine; `prompt` is its ids or only their number."""
    ids = make_prompt(prompt, seed=len(name)) if isinstance(prompt, int) else prompt
    return engine.submit(name, ids, max_new_tokens=max_new_tokens, eos_token_ids=eos, sampling=sampling)


def expected(request: RequestState, eos: tuple[int, ...] = (), sampling: SamplingParams = GREEDY) -> list[int]:
    """The tokens that an engine's request must get."""
    return solo_run(request.prompt, sampling.pack(), request.max_new_tokens, eos, vocab_size=VOCAB_SIZE)


def finish(engine: Engine, *, max_steps: int = 5000) -> None:
    """Steps until nobody is alive."""
    for _ in range(max_steps):
        if engine.is_idle:
            break
        engine.step()
    assert_clean(engine)


def assert_clean(engine: Engine) -> None:
    """Nothing is alive, held or in flight."""
    assert engine.is_idle
    assert engine.state.is_idle
    assert engine.state.pool.num_free == engine.state.config.num_blocks
