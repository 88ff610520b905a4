"""From a prepared input to the engine's request, and from a request to its output: the same for calls and managers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cbjax.engine import Engine
from cbjax.inputs import Prepared
from cbjax.requests import GenerationOutput, RequestState, RequestStatus

if TYPE_CHECKING:
    from cbjax.text import Tokenizer


def submit(
    engine: Engine,
    p: Prepared,
    *,
    seed: int,
    eos_token_ids: tuple[int, ...],
    logprobs: bool,
    created: float | None = None,
    fork_of: RequestState | None = None,
) -> RequestState:
    """Hands an input to the engine.

    Args:
      seed: used if the input's config has none.
      eos_token_ids: used if the input's config names none.
      created, fork_of: as in `Engine.submit`.

    Raises:
      TypeError, ValueError: the input is a bad one; nothing else is touched.
    """
    if p.error is not None:
        raise ValueError(p.error)
    return engine.submit(
        p.request_id,
        p.prompt,
        max_new_tokens=p.config.max_new_tokens,
        eos_token_ids=p.config.eos_token_ids(eos_token_ids),
        sampling=p.config.sampling(seed=seed, logprobs=logprobs, continuation=p.continuation),
        created=created,
        fork_of=fork_of,
        continuation=p.continuation,
    )


def output_of(state: RequestState, tokenizer: Tokenizer | None) -> GenerationOutput:
    """The output of a request that has ended, with its text; failed if the tokenizer cannot decode it."""
    text, error = decoded(tokenizer, state.generated_tokens)
    output = state.snapshot(text)
    if error is None:
        return output
    return replace(output, status=RequestStatus.FAILED, finish_reason="failed", error=error)


def decoded(tokenizer: Tokenizer | None, tokens: list[int]) -> tuple[str, str | None]:
    """The text of output tokens, "" without a tokenizer; and what went wrong."""
    if tokenizer is None:
        return "", None
    try:
        return tokenizer.decode(tokens), None
    except Exception as problem:  # a tokenizer of the caller's may raise anything
        return "", f"the output cannot be decoded: {type(problem).__name__}: {problem}"


def without_tokens(p: Prepared, status: RequestStatus, error: str) -> GenerationOutput:
    """The output of a request that never reached the engine."""
    return GenerationOutput(
        request_id=p.request_id,
        prompt_ids=[int(i) for i in p.prompt if isinstance(i, int | np.integer)],
        generated_tokens=[],
        status=status,
        error=error,
        finish_reason=status.name.lower(),
        continuation=p.continuation,
        created_time=time.time(),
    )
