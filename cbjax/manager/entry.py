"""One request as its submitter and its readers see it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cbjax.inputs import Prepared
from cbjax.manager.handler import Handler
from cbjax.requests import GenerationOutput, RequestState, RequestStatus
from cbjax.submission import decoded, without_tokens

if TYPE_CHECKING:
    from cbjax.text import Tokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A request from `add_request` to its terminal output. Fields that change are written under the ledger's lock.

    Attributes:
      prepared: the input; `prepared.index` counts submissions and tells requests of one name apart.
      seed: used if the config has none.
      streaming: whether tokens are told one by one.
      created: `time.perf_counter` at submission.
      family: all continuations of the same prompt, itself included.
      state: the engine's record, None before it has one. The loop's thread goes on writing it.
      num_tokens: output tokens that readers may see; what the record holds beyond is not published.
      cancelled: by its submitter; nothing is published any more.
      output: the terminal one, set once.
      handler, reader: whom to tell, and what it has been told.
    """

    prepared: Prepared
    seed: int
    streaming: bool
    created: float
    family: Sequence[Entry] = ()
    state: RequestState | None = None
    num_tokens: int = 0
    cancelled: bool = False
    output: GenerationOutput | None = None
    handler: Handler | None = None
    reader: Reader | None = None

    @property
    def relative(self) -> RequestState | None:
        """A continuation of the same prompt that the engine has, whose prompt can be shared."""
        return next((entry.state for entry in self.family if entry.state is not None), None)

    @property
    def index(self) -> int:
        return self.prepared.index

    @property
    def request_id(self) -> str:
        return self.prepared.request_id

    def after(self, count: int) -> GenerationOutput:
        """The snapshot after `count` published tokens."""
        assert self.state is not None
        return self.state.after(count)

    def ended(self, status: RequestStatus, error: str, tokenizer: Tokenizer | None) -> GenerationOutput:
        """The terminal output of a request that the manager ends, with the tokens published so far."""
        if self.state is None:
            now = without_tokens(self.prepared, status, error)
            return replace(now, created_time=now.created_time - (time.perf_counter() - self.created))
        now = self.after(self.num_tokens)
        lifespan = (now.lifespan[0], time.perf_counter() - self.created)
        text, _ = decoded(tokenizer, now.generated_tokens)
        return replace(now, text=text, status=status, error=error, finish_reason=status.name.lower(), lifespan=lifespan)


class Reader:
    """Snapshots of a request one after another, with text that never has to be taken back.

    Attributes:
      num_seen: tokens of the last snapshot.
      first: tokens that were published when it was made.
    """

    def __init__(self, entry: Entry, tokenizer: Tokenizer | None) -> None:
        """The ledger's lock is held."""
        from cbjax.text import Detokenizer

        self._entry, self._text, self.num_seen, self.first = entry, "", 0, entry.num_tokens
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None

    def read(self, count: int) -> GenerationOutput:
        """The snapshot after `count` published tokens, at least as many as before."""
        state = self._entry.state
        assert state is not None
        if self._detokenizer:
            try:
                self._text += self._detokenizer.add(state.generated_tokens[self.num_seen : count])
            except Exception:  # a tokenizer of the caller's may raise anything; the terminal output will say what
                self._detokenizer = None
        self.num_seen = count
        return state.after(count, self._text)
