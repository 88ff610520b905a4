"""`ContinuousBatchingManager`: what users have of the background manager."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbjax.config import ContinuousBatchingConfig, GenerationConfig, WorkloadHints
from cbjax.inputs import Prompt
from cbjax.manager.entry import Reader
from cbjax.manager.handler import Callback, Handler
from cbjax.manager.intake import Intake, given
from cbjax.manager.ledger import Ledger
from cbjax.manager.loop import Loop, Phase
from cbjax.requests import GenerationOutput, RequestStatus
from cbjax.session import Session, reachable_buckets

if TYPE_CHECKING:
    from cbjax.mixin import ContinuousMixin

log = logging.getLogger(__name__)


class ContinuousBatchingManager:
    """Serves requests that come and go, on a thread of its own. Made by `lm.init_continuous_batching`.

    Any number of threads may submit, cancel and read at once. Every request gets exactly one terminal output, whatever
    happens, and that is kept until somebody takes it: `get_result`, iteration, the end of a `request_id_iter`, or a
    handler. Tokens are those of `generate_batch`: a request without a seed gets one derived from the config's and the
    number of requests submitted before it.

    An exception in the loop ends it: its requests fail with the text, model and process stay sound, and `start` works
    again.
    """

    def __init__(
        self,
        lm: ContinuousMixin,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        """As `ContinuousMixin.init_continuous_batching`."""
        self._lm = lm
        self._hints: WorkloadHints = given("workload_hints", workload_hints, WorkloadHints, WorkloadHints())
        self._config: ContinuousBatchingConfig = given(
            "continuous_batching_config",
            continuous_batching_config,
            ContinuousBatchingConfig,
            lm.continuous_batching_config,
        )
        generation = given("generation_config", generation_config, GenerationConfig, lm.generation_config)
        self._destroyed = False
        self._ledger = Ledger()
        self._loop = Loop(lm, self._ledger, self._config)
        self._intake = Intake(lm, self._ledger, self._loop, self._config, generation)

    # Life.

    def warmup(self, *, progress_bar: bool = False) -> None:
        """Compiles, before `start`, what the workload hints can reach; without hints all. No step then waits for it.

        Raises:
          RuntimeError: a manager of this model is running, or this one was destroyed.
          ValueError: the KV store does not fit into memory.
        """
        self._refuse_if_destroyed()
        with self._lm._lending(self._config, self._hints) as session:
            self._warm(session, progress_bar=progress_bar)

    def _warm(self, session: Session, *, progress_bar: bool = False) -> None:
        hints, buckets = self._hints, None
        if hints.num_requests and hints.max_prompt_length and hints.max_generated_length:
            buckets = reachable_buckets(session.resolved, [hints] * hints.num_requests)
        session.warmup(buckets, forks=hints.num_requests != 1, progress_bar=progress_bar)

    def start(self) -> None:
        """Starts the loop, also after `stop` or an error; one that still stops is waited for.

        With `batch_invariant`, what `warmup` does is done first if it has not been.

        Raises:
          RuntimeError: another manager of this model is running, this one was destroyed, or `batch_invariant` was asked
            for and no program has it.
          ValueError: the KV store does not fit into memory.
        """
        self._refuse_if_destroyed()
        self._refuse_in_handler("start")
        if self._loop.phase is Phase.RUNNING:
            log.warning("the manager is running already; start() changes nothing")
            return
        self._loop.join()
        with self._lm._lending(self._config, self._hints) as session:
            if self._config.batch_invariant:
                self._warm(session)
            self._lm._manager = self
            try:
                self._loop.start(session)
            except BaseException:
                self._lm._manager = None
                raise

    def is_running(self) -> bool:
        """Whether the loop runs; also while it finishes what it has after a `stop` that did not wait."""
        return self._loop.phase in (Phase.RUNNING, Phase.STOPPING)

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> bool:
        """Takes no more requests, finishes those there are, and ends the loop.

        Results that were not fetched are kept.

        Args:
          block: wait for the end.
          timeout: seconds to wait at most; None: as long as it takes.
          hard_stop: do not finish: every request ends as CANCELLED, with the tokens it has. Also after a `stop` that
            takes too long.

        Returns:
          Whether the loop has ended.

        Raises:
          RuntimeError: a handler calls it on the manager's own thread and wants to wait.
        """
        if block:
            self._refuse_in_handler("stop(block=True)")
        self._loop.stop(cancel_all=hard_stop)
        if hard_stop and self._loop.phase is Phase.NEW:
            for request_id in list(self._ledger.alive):
                self.cancel_request(request_id)
        return self._loop.join(timeout) if block else not self.is_running()

    @contextmanager
    def running(self, *, block: bool, timeout: float | None, warmup: bool) -> Iterator[None]:
        """Runs inside the `with`, as `continuous_batching_context_manager` says."""
        if warmup:
            self.warmup()
        self.start()
        try:
            yield
            if not self.stop(block=block, timeout=timeout) and block:
                log.warning("the manager still runs after timeout=%s s; it ends when its requests have ended", timeout)
        except BaseException:
            self.stop(hard_stop=True)
            raise

    def destroy(self) -> None:
        """Hard-stops, drops results, and gives the KV store's memory back. Final: make a new manager afterwards."""
        self.stop(hard_stop=True)
        self._destroyed = True
        self._ledger.forget()
        session, self._loop.session = self._loop.session, None
        if session is not None:
            self._lm._release(session)

    # Requests.

    def add_request(
        self,
        input_ids: Prompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> str:
        """Submits one request. Before the first `start` it waits for that.

        Args:
          input_ids: token ids, text, or chat messages.
          request_id: its name, not one of a request that is alive; None: "req_0", "req_1", ...
          max_new_tokens, eos_token_id: in place of the generation config's.
          streaming: let `request_id_iter` and handlers see each token, not only the terminal output.
          generation_config: None: the manager's.

        Returns:
          Its name.

        Raises:
          TypeError, ValueError: the request is a bad one; no other is touched. Before the first `start` the size of
            the KV store is not known: what does not fit it ends as FAILED then.
          RuntimeError: the manager was stopped or destroyed, or its loop ended by an error.
        """
        self._refuse_if_destroyed()
        config = self._intake.config(generation_config, max_new_tokens, eos_token_id)
        return self._intake.one(input_ids, request_id, config, streaming=streaming)

    def add_requests(
        self,
        inputs: Sequence[Prompt],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        *,
        request_ids: Sequence[str] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    ) -> list[str]:
        """Submits many. A bad one ends as FAILED, with the reason; the others are not touched by it.

        With block sharing asked for, prompts with a common prefix are submitted one after another, the longest first.
        Seeds are derived from the order of `inputs`.

        Args:
          inputs: prompts, each as in `add_request`, in any mixture.
          generation_config: one for all, or one per prompt; None: the manager's.
          The others: as in `add_request`.

        Returns:
          Their names in the order of `inputs`: `[manager.get_result(name) for name in names]`.

        Raises:
          TypeError, ValueError: the call as a whole cannot be served; then nothing was submitted.
          RuntimeError: as `add_request`.
        """
        self._refuse_if_destroyed()
        if isinstance(generation_config, Sequence):
            configs = [self._intake.config(one, max_new_tokens, eos_token_id) for one in generation_config]
        else:
            configs = self._intake.config(generation_config, max_new_tokens, eos_token_id)
        return self._intake.many(inputs, request_ids, configs, streaming=streaming)

    def cancel_request(self, request_id: str) -> bool:
        """Ends a request now, as CANCELLED and with the tokens it has; its name is free at once.

        Returns:
          Whether it was alive. If not (unknown, ended, cancelled before), nothing happens.
        """
        with self._ledger.lock:
            entry = self._ledger.cancel(request_id)
            if entry is None:
                return False
            is_open = self._ledger.is_open
            self._loop.post_cancel(entry)
        self._ledger.finish(entry, entry.ended(RequestStatus.CANCELLED, "cancelled", self._lm.tokenizer))
        if not is_open:
            self._loop.tell(entry)
        return True

    # Outputs.

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Waits for a terminal output and takes it: that of `request_id`, or the first one not taken.

        A name used again stands for its oldest request whose output was not taken.

        Args:
          timeout: seconds; None: as long as the manager runs.

        Returns:
          None if none came in time, or if the manager does not run, so that none will come.

        Raises:
          KeyError: no such request, or its output was taken already.
          RuntimeError: a handler would wait for its own thread.
        """
        self._refuse_in_handler("get_result")
        if request_id is None:
            return self._ledger.next_result(timeout)
        return self._ledger.result(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Terminal outputs as requests end; stops when every one was taken and none is left to end.

        A consumer that waits for requests yet to come calls `get_result()` until it returns None.
        """
        self._refuse_in_handler("iteration")
        while (output := self._ledger.next_result(None, until_drained=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """One request's snapshots: one after each token if it is `streaming`, the last one terminal.

        Every token is seen, in order, however slowly it is read, and nothing of other requests is touched. Text never
        has to be taken back. Leaving the iterator early neither cancels the request nor takes its output.

        Raises:
          KeyError: as `get_result`, at once.
          RuntimeError: the manager was not started, or a handler would wait for its own thread.
        """
        self._refuse_in_handler("request_id_iter")
        with self._ledger.lock:
            entry = self._ledger.find(request_id)
        return self._ledger.stream(entry, Reader(entry, self._lm.tokenizer))

    def register_result_handler(self, request_id: str, callback: Callback) -> None:
        """Has `callback` called with the request's outputs: at each token if it is `streaming`, and at its end.

        Nothing is lost if it is registered late: the first call brings all tokens so far. Called within a running
        asyncio loop, callbacks run on that loop; else on the manager's thread, where they should be quick and must not
        wait for results. What they raise is logged and touches nothing else. The output counts as taken.

        Raises:
          KeyError: as `get_result`.
          TypeError: not a plain function.
          ValueError: the request has a handler.
        """
        handler = Handler(callback)
        with self._ledger.lock:
            entry = self._ledger.find(request_id)
            if entry.handler is not None:
                raise ValueError(f"request {request_id!r} has a result handler; there can be one")
            entry.handler, entry.reader = handler, Reader(entry, self._lm.tokenizer)
            self._ledger.handle(entry)
            is_open = self._ledger.is_open
            if is_open:
                self._loop.post_tell(entry)
        if not is_open:
            self._loop.tell(entry)

    # Inside.

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Around new weights: no request has KV of the old ones, and none comes meanwhile."""
        with self._ledger.lock:
            if self._ledger.unfinished:
                raise RuntimeError(
                    f"{len(self._ledger.unfinished)} requests of this model's manager have not ended, and their keys "
                    "and values are of the old params: wait for them, cancel them, or stop the manager, then set params"
                )
            yield
            self._loop.post_new_params()

    def _refuse_if_destroyed(self) -> None:
        if self._destroyed:
            raise RuntimeError("the manager was destroyed: make a new one with lm.init_continuous_batching()")

    def _refuse_in_handler(self, what: str) -> None:
        if self._loop.is_current_thread():
            raise RuntimeError(f"{what} on the manager's own thread (in a result handler) would wait for itself")
