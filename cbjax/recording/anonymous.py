"""A recording without its tokens: other ids, and the same plans."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike

import numpy as np

from cbjax.recording.compare import differences
from cbjax.recording.encoding import RecordingError
from cbjax.recording.inputs import Add, Cancel, Input, Reset, Start, Update
from cbjax.recording.player import Player, ReplayMismatch
from cbjax.recording.reader import Recording
from cbjax.recording.writer import RecordingWriter
from cbjax.scheduler import Request, StepPlan, StepResults

# Above every vocabulary, so that no other id becomes one that ends a request.
_FIRST_ID = 1 << 30


def anonymise(recording: Recording, path: str | PathLike[str]) -> None:
    """Writes a recording again with other token ids. Its plans are the same apart from these, which is checked.

    An id becomes a keyed hash of itself and of all tokens before it, so that exactly those prompts begin alike that
    did. The key is drawn anew and forgotten. Namespaces are replaced likewise. Lengths, EOS ids, sampling settings and
    the order of events stay.

    Raises:
      OSError: the file cannot be written.
      RecordingError: a plan comes out otherwise; the file is not closed then.
      As `replay`: the recording itself cannot be replayed.
    """
    disguise, is_copied = _Disguise(), False
    writer = RecordingWriter(path)
    original, copy = Player(), Player(journal=writer)
    try:
        for number, given in enumerate(recording.inputs, start=1):
            plan = original.in_flight[0] if original.in_flight else None
            answer = _outcome(original, given)
            other = _outcome(copy, disguise.of(given, plan))
            found = list(differences(_without_tokens(answer), _without_tokens(other), "answer"))
            if found:
                raise RecordingError(
                    f"{recording.name}: record {number} has another effect without its tokens: {found}"
                )
            if isinstance(answer, StepResults):
                disguise.forget(ended.uid for ended in answer.ended)
        is_copied = True
    finally:
        writer.close(is_complete=is_copied and recording.is_complete)


type _Outcome = StepPlan | StepResults | type[Exception] | None


def _outcome(player: Player, given: Input) -> _Outcome:
    """What the input leads to; an error, too, if it is the scheduler's own, which is then part of the recording."""
    try:
        return player.apply(given)
    except ReplayMismatch:
        raise
    except Exception as error:
        return type(error)


def _without_tokens(outcome: _Outcome) -> _Outcome:
    match outcome:
        case StepPlan(batch=batch):
            return replace(outcome, batch=replace(batch, tokens=np.zeros_like(batch.tokens)))
        case StepResults(tokens=tokens):
            return replace(outcome, tokens=np.zeros_like(tokens))
    return outcome


class _Disguise:
    """Replaces ids; remembers of each request that is alive the hash of its tokens so far, and what ends it."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._alive: dict[int, tuple[bytes, frozenset[int]]] = {}

    def of(self, given: Input, plan: StepPlan | None) -> Input:
        """The input with other ids; `plan` is the one that an `Update` answers."""
        match given:
            case Start() | Reset():
                self._alive.clear()
            case Cancel(uid=uid):
                self.forget([uid])
            case Add(request=request):
                return Add(request=self._request(request))
            case Update() if plan is not None:
                return replace(given, tokens=self._answers(given, plan))
        return given

    def forget(self, uids: Iterable[int]) -> None:
        """These have ended."""
        for uid in uids:
            self._alive.pop(uid, None)

    def _hash(self, before: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(before + content, digest_size=16, key=self._key).digest()

    def _next(self, before: bytes, token: int) -> tuple[bytes, int]:
        now = self._hash(before, token.to_bytes(4, "little"))
        return now, _FIRST_ID + int.from_bytes(now[:4], "little") % _FIRST_ID

    def _request(self, request: Request) -> Request:
        state, ids = self._hash(b"", request.namespace), []
        namespace = state if request.namespace else b""
        for token in request.prompt.tolist():
            state, id = self._next(state, token)
            ids.append(id)
        self._alive[request.uid] = state, frozenset(request.eos_token_ids)
        prompt = np.array(ids, np.int32)
        prompt.setflags(write=False)
        return replace(request, prompt=prompt, namespace=namespace)

    def _answers(self, given: Update, plan: StepPlan) -> np.ndarray:
        """i32[window * rows]; 0 where nobody will read it."""
        batch = plan.batch
        counts = np.arange(batch.window)[:, None] < batch.draws
        if given.finite is not None:
            counts &= given.finite.reshape(counts.shape)
        tokens, answers = np.zeros(counts.shape, np.int32), given.tokens.reshape(counts.shape)
        ended: set[int] = set()  # within the window
        for step, row in np.argwhere(counts):
            uid, token = int(batch.uid[row]), int(answers[step, row])
            if uid in self._alive and uid not in ended:
                state, eos = self._alive[uid]
                state, id = self._next(state, token)
                self._alive[uid] = state, eos
                tokens[step, row] = token if token in eos else id
                if token in eos:
                    ended.add(uid)
        return tokens.ravel()
