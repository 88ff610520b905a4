"""What a request is to the scheduler: tokens, limits, and opaque sampler words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One submission. Immutable; its arrays are read-only.

    Attributes:
      uid: unique within a scheduler state, in order of submission.
      prompt: i32[prompt tokens], at least one.
      max_new_tokens: output tokens after which it ends with "length"; at least one.
      eos_token_ids: output tokens that end it with "stop".
      words: u32[words], the sampler's settings; the scheduler only carries them.
      namespace: only requests of one namespace share blocks.
      fork_of: uid of the request whose prompt this one continues, too; None: it has a prompt of its own.
    """

    uid: int
    prompt: np.ndarray
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    words: np.ndarray
    namespace: bytes = b""
    fork_of: int | None = None

    @property
    def family(self) -> int:
        """The same for all continuations of one prompt."""
        return self.uid if self.fork_of is None else self.fork_of

    @property
    def num_cells(self) -> int:
        """KV cells it can come to need: the last output token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


def read_only(values, dtype) -> np.ndarray:
    """A private, read-only copy."""
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
