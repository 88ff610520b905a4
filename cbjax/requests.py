"""What a request is to its caller: its status, its state while it runs, and the snapshot it is answered with."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np


class RequestStatus(IntEnum):
    """Where a request is in its life; from FINISHED on nothing changes any more."""

    PENDING = 0  # waits for a place, or for its return after a soft reset
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """A snapshot of a request, with all of its tokens so far.

    Attributes:
      request_id: the caller's name for it.
      prompt_ids: the prompt's token ids; never changed by a soft reset.
      continuation: which of the prompt's continuations it is, from 0 (`num_return_sequences`).
      generated_tokens: output token ids, an EOS that ended it included.
      text: the output as text without special tokens; "" without a tokenizer.
      logprobs: log-probability of each output token under the distribution it was drawn from (the raw one for greedy
        requests); empty unless `return_logprobs`.
      status, error: how it is, and why it failed.
      finish_reason: "stop" (an EOS id), "length" (`max_new_tokens`, or the model's last position), "cancelled",
        "failed"; None while it runs.
      created_time: seconds since the epoch at submission.
      lifespan: seconds from submission to its first step and to its end; -1.0 where that has not happened.
      timestamps: seconds from submission to each output token.
      num_soft_resets: how often it lost its blocks and was recomputed.
      num_offloads: how often it lost its blocks and its KV waited in host memory.
      num_cached_tokens: prompt tokens whose KV was found when it was first admitted, in the prefix cache or with
        another continuation of the same prompt.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    continuation: int = 0
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    finish_reason: str | None = None
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] = field(default_factory=list)
    num_soft_resets: int = 0
    num_offloads: int = 0
    num_cached_tokens: int = 0

    def is_finished(self) -> bool:
        """Whether this is the request's last word."""
        return self.status >= RequestStatus.FINISHED

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission to the first output token."""
        return self.timestamps[0] if self.timestamps else None


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request while the engine has it. The engine alone writes it; everyone else takes `snapshot()`.

    Attributes:
      uid: the scheduler's number for it.
      prompt: i32[prompt tokens].
      max_new_tokens: output tokens at most, the model's positions already considered.
      wants_logprobs: whether `logprobs` is filled.
      num_lost_tokens: tokens whose KV it lost when it was evicted last.
      created, started, ended: seconds on the engine's clock; None where that has not happened.
      The others: as in `GenerationOutput`.
    """

    request_id: str
    uid: int
    prompt: np.ndarray
    max_new_tokens: int
    wants_logprobs: bool
    continuation: int = 0
    created_time: float
    created: float
    started: float | None = None
    ended: float | None = None
    status: RequestStatus = RequestStatus.PENDING
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    error: str | None = None
    finish_reason: str | None = None
    num_soft_resets: int = 0
    num_offloads: int = 0
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0

    def end(self, status: RequestStatus, reason: str, now: float, error: str | None = None) -> None:
        """The terminal state; reached exactly once."""
        assert self.status < RequestStatus.FINISHED, f"request {self.request_id!r} ended twice"
        self.status, self.finish_reason, self.error, self.ended = status, reason, error, now

    def snapshot(self, text: str = "") -> GenerationOutput:
        """An immutable copy for the caller."""
        return GenerationOutput(
            generated_tokens=list(self.generated_tokens),
            text=text,
            logprobs=list(self.logprobs),
            status=self.status,
            error=self.error,
            finish_reason=self.finish_reason,
            lifespan=(self._since(self.started), self._since(self.ended)),
            timestamps=list(self.timestamps),
            **self._what_it_is(),
        )

    def after(self, count: int, text: str = "") -> GenerationOutput:
        """What `snapshot` was after `count` output tokens; any thread may take it, since the lists only grow."""
        return GenerationOutput(
            generated_tokens=self.generated_tokens[:count],
            text=text,
            logprobs=self.logprobs[:count],
            status=RequestStatus.DECODING if count else RequestStatus.PENDING,
            lifespan=(self._since(self.started), -1.0),
            timestamps=self.timestamps[:count],
            **self._what_it_is(),
        )

    def _what_it_is(self) -> dict[str, Any]:
        """The fields of an output that do not depend on how many tokens it tells of."""
        return {
            "request_id": self.request_id,
            "prompt_ids": self.prompt.tolist(),
            "continuation": self.continuation,
            "created_time": self.created_time,
            "num_soft_resets": self.num_soft_resets,
            "num_offloads": self.num_offloads,
            "num_cached_tokens": self.num_cached_tokens,
        }

    def _since(self, moment: float | None) -> float:
        return -1.0 if moment is None else moment - self.created
