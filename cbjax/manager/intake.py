"""From what a caller hands in to entries of the ledger."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from cbjax.config import ContinuousBatchingConfig, GenerationConfig
from cbjax.inputs import Prepared, Prompt, checked_names, encode_prompt, prepare
from cbjax.manager.entry import Entry
from cbjax.manager.ledger import Ledger
from cbjax.manager.loop import Loop, Phase
from cbjax.requests import RequestStatus
from cbjax.sampling import derive_seed
from cbjax.strict import check_bool, checked_ids
from cbjax.submission import without_tokens

if TYPE_CHECKING:
    from cbjax.mixin import ContinuousMixin

log = logging.getLogger(__name__)


class Intake:
    """Encodes and checks on the caller's thread, then hands over under the lock: a request is there as a whole or not.

    Seeds are derived from the config's and the number of requests submitted before, as `generate_batch` derives them.
    """

    def __init__(
        self,
        lm: ContinuousMixin,
        ledger: Ledger,
        loop: Loop,
        batching: ContinuousBatchingConfig,
        generation: GenerationConfig,
    ) -> None:
        self._lm, self._ledger, self._loop = lm, ledger, loop
        self._sorts, self._generation = batching.allow_block_sharing, generation
        self._seed = secrets.randbits(63) if batching.seed is None else batching.seed
        self._num_prompts, self._indices = 0, count()

    def config(
        self, config: GenerationConfig | None, max_new_tokens: int | None, eos_token_id: int | Sequence[int] | None
    ) -> GenerationConfig:
        """A request's config, with what was given beside it in its place."""
        base: GenerationConfig = given("generation_config", config, GenerationConfig, self._generation)
        changes: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        return replace(base, **{name: value for name, value in changes.items() if value is not None})

    def one(self, prompt: Prompt, request_id: str | None, config: GenerationConfig, *, streaming: bool) -> str:
        """Submits one request; a bad one raises."""
        names = None if request_id is None else checked_names(1, [request_id])
        ids = self._checked(encode_prompt(prompt, self._lm.tokenizer), config)
        prepared = Prepared(index=0, request_id="", prompt=ids, config=config)
        (name,) = self._submit([prepared], names, streaming)
        return name

    def many(
        self,
        inputs: Sequence[Prompt],
        request_ids: Sequence[str] | None,
        configs: GenerationConfig | Sequence[GenerationConfig],
        *,
        streaming: bool,
    ) -> list[str]:
        """Submits many; a bad one fails alone."""
        num_inputs = len(inputs) if hasattr(inputs, "__len__") else 0
        names = None if request_ids is None else checked_names(num_inputs, request_ids)
        prepared = prepare(inputs, configs, [""] * num_inputs, self._lm.tokenizer)
        return self._submit([self._checked_or_failed(p) for p in prepared], names, streaming)

    def _checked(self, prompt: Sequence[int] | np.ndarray, config: GenerationConfig) -> np.ndarray:
        """i32[tokens], checked as far as the engine is known; raises as `Engine.submit`."""
        eos, engine = config.eos_token_ids(self._lm.eos_token_ids), self._loop.engine
        if engine is None:
            return checked_ids(prompt, eos, self._lm.vocab_size)
        ids, _ = engine.check(prompt, max_new_tokens=config.max_new_tokens, eos_token_ids=eos)
        return ids

    def _checked_or_failed(self, p: Prepared) -> Prepared:
        if p.error is not None:
            return p
        try:
            return replace(p, prompt=self._checked(p.prompt, p.config))
        except (TypeError, ValueError) as error:
            return replace(p, error=str(error))

    def _submit(self, prepared: Sequence[Prepared], names: list[str] | None, streaming: bool) -> list[str]:
        check_bool("streaming", streaming)
        order = self._order(prepared)
        with self._ledger.lock:
            self._refuse_unless_accepting()
            if names is None:
                families = [self._with_free_names(p) for p in prepared]
            else:
                named = [replace(p, request_id=name) for p, name in zip(prepared, names, strict=True)]
                families = [p.continuations() for p in named]
            everybody = [p.request_id for family in families for p in family]
            for name in checked_names(len(everybody), everybody):
                if name in self._ledger.alive:
                    raise ValueError(f"request_id {name!r} is in use by a request that has not ended; choose another")
            entries = [self._entries(family, streaming) for family in families]
            for family in entries:
                for entry in family:
                    self._ledger.add(entry)
            for place in order:
                for entry in entries[place]:
                    self._loop.post_submit(entry)
        for entry in chain.from_iterable(entries):
            if (error := entry.prepared.error) is not None:
                log.warning("request %s is refused: %s", entry.request_id, error)
                self._ledger.finish(entry, without_tokens(entry.prepared, RequestStatus.FAILED, error))
        return [family[0].request_id for family in families]

    def _order(self, prepared: Sequence[Prepared]) -> list[int]:
        """Places of the good ones as they are submitted: descending, so that a prefix follows what it is one of."""
        order = [place for place, p in enumerate(prepared) if p.error is None]
        if self._sorts:
            order.sort(key=lambda place: tuple(np.asarray(prepared[place].prompt).tolist()), reverse=True)
        return order

    def _entries(self, family: Sequence[Prepared], streaming: bool) -> list[Entry]:
        """One for each continuation of a prompt."""
        seed, now = derive_seed(self._seed, self._num_prompts), time.perf_counter()
        self._num_prompts += 1
        entries: list[Entry] = []
        for p in family:
            entry = Entry(
                prepared=replace(p, index=next(self._indices)),
                seed=seed,
                streaming=streaming,
                created=now,
                family=entries,
            )
            entries.append(entry)
        return entries

    def _with_free_names(self, p: Prepared) -> list[Prepared]:
        """The continuations of a prompt under the next automatic name, of which nobody has any."""
        while True:
            family = replace(p, request_id=f"req_{next(self._lm._auto_ids)}").continuations()
            if not any(self._ledger.knows(each.request_id) for each in family):
                return family

    def _refuse_unless_accepting(self) -> None:
        if self._loop.phase in (Phase.NEW, Phase.RUNNING):
            return
        error = self._loop.error
        why = "was stopped" if error is None else f"ended by an error ({error})"
        raise RuntimeError(f"the manager {why}: start() it again before you submit") from error


def given(name: str, value: Any, kind: type, default: Any) -> Any:
    """`value`, or `default` for None.

    Raises:
      TypeError: it is of another kind.
    """
    if value is None:
        return default
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or None; got {type(value).__name__}")
    return value
