"""A model for the manager's tests: the real engine on the history-hash device, whose steps a test can hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from engines import assert_clean
from machines import VOCAB_SIZE, make_config

from cbjax import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    ContinuousMixin,
    GenerationConfig,
    GenerationOutput,
)
from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.engine import Engine
from cbjax.ladder import make_ladder
from cbjax.pace import Pace
from cbjax.sampling import NUM_WORDS, derive_seed
from cbjax.scheduler import StepOutputs
from cbjax.testing import HistoryHashDevice, solo_run

SECONDS = 20.0  # nothing here takes a hundredth of it; a wait that is in vain fails instead of hanging
SEED = 7
NEW_TOKENS = 6


class HeldDevice(HistoryHashDevice):
    """Once held, each step stops between its plan and its answer until it is let go.

    Attributes:
      error: raised by the next step, in place of its answer.
      num_steps: begun so far.
    """

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.error: BaseException | None = None
        self.num_steps = 0
        self._begun, self._let_go = threading.Semaphore(0), threading.Semaphore(0)
        self._held = False

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> StepOutputs:
        answer = super().forward(batch, bucket)
        self.num_steps += 1
        if self._held:
            self._begun.release()
            assert self._let_go.acquire(timeout=SECONDS)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return answer

    def hold(self) -> None:
        self._held = True

    def wait(self) -> None:
        """Until a step is held."""
        assert self._begun.acquire(timeout=SECONDS), "no step began"

    def step(self) -> None:
        """Lets the step that is held go, and waits for the next one."""
        self._let_go.release()
        self.wait()

    def free(self) -> None:
        """Holds no step any more."""
        self._held = False
        self._let_go.release()


class HashLM(ContinuousMixin):
    """The prompt decides the tokens, by hashing; see `HistoryHashDevice`."""

    def __init__(self, *, depth: int = 0, max_window: int = 1, tokenizer=None, **scheduler) -> None:
        super().__init__()
        self.params, self.tokenizer, self.eos_token_ids = {}, tokenizer, ()
        self.vocab_size, self.max_positions = VOCAB_SIZE, 4096
        self.generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=-1)
        self.continuous_batching_config = ContinuousBatchingConfig(seed=SEED)
        self.scheduler, self.depth = make_config(num_words=NUM_WORDS, **scheduler), depth
        self.pace = Pace(max_window=max_window, step_seconds=0.0)
        self.num_sessions = 0

    @property
    def device(self) -> HeldDevice:
        return self.session.device

    @property
    def engine(self) -> Engine:
        return self.session.engine

    def _session_for(self, config, hints, sizes, *, open_ended=False):
        if self._session is None:
            self._session = self._make_session()
        return self._session

    def _make_session(self):
        self.num_sessions += 1
        config = self.scheduler
        device = HeldDevice(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_slots=config.max_requests_per_batch,
            max_blocks=config.max_blocks_per_request,
            vocab_size=VOCAB_SIZE,
        )
        device.programs = {}
        ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
        engine = Engine(
            device,
            config,
            ladder,
            vocab_size=VOCAB_SIZE,
            max_positions=self.max_positions,
            depth=self.depth,
            pace=self.pace,
        )
        resolved = SimpleNamespace(scheduler=config, ladder=ladder, block_bytes=1)
        return SimpleNamespace(
            engine=engine,
            device=device,
            resolved=resolved,
            use=lambda params: None,
            warmup=lambda *a, **k: [],
            close=lambda: None,
        )


@contextmanager
def running_manager(lm: HashLM) -> Iterator[ContinuousBatchingManager]:
    """A manager that runs, and must end well."""
    manager = lm.init_continuous_batching()
    manager.start()
    yield manager
    lm.device.free()
    manager.stop(hard_stop=True)
    assert_idle(lm)


def right(
    prompt: list[int], index: int, count: int = NEW_TOKENS, eos: tuple[int, ...] = (), *, seed: int | None = None
) -> list[int]:
    """The tokens that the `index`-th greedy request must get, whatever else happens; `seed`: its own."""
    words = GenerationConfig(seed=seed).sampling(seed=derive_seed(SEED, index), logprobs=False).pack()
    return solo_run(prompt, words, count, eos, vocab_size=VOCAB_SIZE)


def result(manager: ContinuousBatchingManager, name: str) -> GenerationOutput:
    """The request's terminal output."""
    output = manager.get_result(name, timeout=SECONDS)
    assert output is not None, f"no output of {name}"
    assert output.is_finished()
    assert output.request_id == name
    return output


def run_threads(*targets: Callable[[], object]) -> None:
    """Runs them at once, and waits for all."""
    barrier, errors = threading.Barrier(len(targets)), []

    def run(target: Callable[[], object]) -> None:
        barrier.wait(SECONDS)
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread waits in vain"
    assert not errors, errors


def assert_idle(lm: HashLM) -> None:
    """No manager runs, no thread is left, no request is alive, no block is held."""
    assert lm.manager is None
    assert "cbjax-manager" not in [thread.name for thread in threading.enumerate()]
    assert_clean(lm.engine)
