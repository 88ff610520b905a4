"""From what a caller hands in to token ids: ids, text, or chat messages, each on its own or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cbjax.config import GenerationConfig, WorkloadHints

if TYPE_CHECKING:
    from cbjax.text import Tokenizer

type Message = Mapping[str, Any]
type Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One input: its ids, or why it has none.

    Attributes:
      index: place in the call.
      continuation: which of the prompt's continuations, from 0.
      prompt: token ids, not yet checked against the model; empty if `error`.
      error: what is wrong with the input, for its caller.
    """

    index: int
    request_id: str
    prompt: Sequence[int] | np.ndarray
    config: GenerationConfig
    continuation: int = 0
    error: str | None = None

    def continuations(self) -> list[Prepared]:
        """This and the other continuations that its config asks for; these are named after it."""
        others = range(1, self.config.num_return_sequences)
        return [self, *(replace(self, continuation=i, request_id=f"{self.request_id}__child#{i}") for i in others)]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int] | np.ndarray:
    """Token ids of one input.

    Args:
      prompt: text (encoded with the special tokens the tokenizer adds), chat messages (through the chat template), or
        token ids, which are taken as they are.

    Raises:
      TypeError, ValueError: it is none of these, text without a tokenizer, or nothing the tokenizer can encode.
    """
    try:
        return _encode(prompt, tokenizer)
    except (TypeError, ValueError):
        raise
    except Exception as problem:  # a tokenizer, a template or a sequence of the caller's may raise anything
        raise ValueError(f"the prompt cannot be encoded: {type(problem).__name__}: {problem}") from problem


def _encode(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int] | np.ndarray:
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not (isinstance(prompt, str) or is_chat):
        if not isinstance(prompt, Sequence) and not (hasattr(prompt, "__array__") and np.ndim(prompt)):
            raise TypeError(f"a prompt is text, chat messages or token ids; got {type(prompt).__name__}")
        return cast(Sequence[int], prompt) if isinstance(prompt, Sequence) else np.asarray(prompt)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so its prompts must be token ids; got text")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.chat(prompt)  # pyright: ignore[reportArgumentType]


def prepare(
    inputs: Sequence[Prompt],
    configs: GenerationConfig | Sequence[GenerationConfig],
    request_ids: Sequence[str],
    tokenizer: Tokenizer | None,
) -> list[Prepared]:
    """Every input as ids, each with its config; a bad one carries its error and harms no other.

    Raises:
      TypeError, ValueError: `inputs` is no list of prompts, or `configs` do not match it.
    """
    if isinstance(inputs, str | Mapping) or not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(f"inputs is a list of prompts; got {type(inputs).__name__}: put a single prompt into a list")
    if len(inputs) and isinstance(inputs[0], int | np.integer | Mapping):
        raise TypeError(f"inputs is a list of prompts; got a list of {type(inputs[0]).__name__}: put it into a list")
    if isinstance(configs, GenerationConfig):
        configs = [configs] * len(inputs)
    if not isinstance(configs, Sequence):
        raise TypeError(f"generation_config is one GenerationConfig, or one per prompt; got {type(configs).__name__}")
    if len(configs) != len(inputs) or not all(isinstance(config, GenerationConfig) for config in configs):
        raise ValueError(
            "generation_config is one GenerationConfig, or a sequence with one per prompt; "
            f"got {len(configs)} for {len(inputs)} prompts"
        )
    prepared = []
    for index, (prompt, config, request_id) in enumerate(zip(inputs, configs, request_ids, strict=True)):
        ids, error = [], None
        try:
            ids = encode_prompt(prompt, tokenizer)
        except (TypeError, ValueError) as problem:
            error = str(problem)
        prepared.append(Prepared(index=index, request_id=request_id, prompt=ids, config=config, error=error))
    return prepared


def checked_names(count: int, given: Sequence[str]) -> list[str]:
    """Request ids as their caller chose them.

    Raises:
      ValueError: not one str per prompt, or one of them twice.
    """
    names = [] if isinstance(given, str) else list(given)
    if len(names) != count or not all(isinstance(name, str) for name in names):
        raise ValueError(f"request_ids must be a sequence of one str per prompt ({count}); got {given!r:.80}")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"request_ids must differ; given more than once: {', '.join(map(repr, twice[:5]))}")
    return names


def hints_of(prepared: Sequence[Prepared], max_positions: int, max_tokens: int | None = None) -> WorkloadHints:
    """What these requests can come to need, in tokens; those that will be refused need nothing.

    Args:
      max_positions: of the model.
      max_tokens: cells that one request can have at most, where that is fixed.
    """

    def new_tokens(p: Prepared) -> int:
        room = max_positions - len(p.prompt)
        if p.config.max_new_tokens is not None:
            return min(room, p.config.max_new_tokens)
        return room if max_tokens is None else min(room, max_tokens - len(p.prompt) + 1)

    good = [p for p in prepared if p.error is None and 0 < len(p.prompt) < max_positions]
    if max_tokens is not None:
        good = [p for p in good if new_tokens(p) > 0 and len(p.prompt) + new_tokens(p) - 1 <= max_tokens]
    if not good:
        return WorkloadHints()

    longest = max(len(p.prompt) for p in good)
    total = max(len(p.prompt) + new_tokens(p) for p in good)
    return WorkloadHints(
        max_prompt_length=longest,
        max_generated_length=max(max(new_tokens(p) for p in good), total - longest),
        num_requests=len(good),
    )
