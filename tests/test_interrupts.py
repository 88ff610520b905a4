"""B40: whatever interrupts a call, and wherever: no thread, request or held block stays, and the next call is right."""

import contextlib
import dataclasses
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import cbjax
from cbjax import ContinuousBatchingConfig, GenerationConfig, RequestStatus, engine, programs, progress
from cbjax.cache import PagedAttentionCache
from cbjax.programs import ModelDevice
from cbjax.recording import live
from cbjax.testing import ByteTokenizer, tiny_llama

PROMPTS = [[72, 101, 108], [5], [200, 9, 9, 31, 7, 64, 12, 80, 3]]
GREEDY = GenerationConfig(max_new_tokens=10, eos_token_id=-1)
CONFIG = ContinuousBatchingConfig(
    block_size=4,
    num_blocks=64,
    max_blocks_per_request=64,
    max_batch_tokens=64,
    max_requests_per_batch=8,
    return_logprobs=True,
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def lm():
    model = tiny_llama(tokenizer=ByteTokenizer())
    yield model
    model.close()


@pytest.fixture(scope="module")
def right(lm):
    """What an undisturbed call gives."""
    return [output.generated_tokens for output in generate(lm)]


def generate(lm, config=CONFIG, **options):
    return list(lm.generate_batch(PROMPTS, GREEDY, config, **options).values())


@contextlib.contextmanager
def leaves_nothing(lm, right):
    """Around what is interrupted: afterwards everything is as if it had not been."""
    generate(lm)
    threads, session = threading.enumerate(), lm.session
    yield
    assert threading.enumerate() == threads
    assert lm.session is session
    engine = lm.session.engine
    assert engine.is_idle
    assert not engine.alive
    assert engine.state.is_idle
    assert engine.state.pool.num_free == 64
    for _ in range(2):
        assert [output.generated_tokens for output in generate(lm)] == right
        assert lm.summary.compiled == 0


def assert_partial(lm, right, count, status, reason):
    """`last_outputs` holds what had come: `count` tokens of each request."""
    outputs = list(lm.last_outputs.values())
    assert [output.generated_tokens for output in outputs] == [tokens[:count] for tokens in right]
    assert {(output.status, output.finish_reason) for output in outputs} == {(status, reason)}
    for output in outputs:
        assert output.error
        assert output.is_finished()
        assert len(output.logprobs) == len(output.timestamps) == count
        assert output.text == ByteTokenizer().decode(output.generated_tokens)


def raising(function, error, *, at, late=False):
    """`function`, but its `at`-th call raises, before or (`late`) after the real work."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at and not late:
            raise error
        result = function(*args, **kwargs)
        if calls == at:
            raise error
        return result

    return wrapped


# Where: object, name, and the number of tokens that each request has got by its third call.
STEPS = {
    "schedule": (live, "schedule", 2),
    "forward": (ModelDevice, "forward", 2),
    "update": (live, "update", 2),
    "deliver": (engine.Engine, "_deliver", 2),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", STEPS)
def test_b40_an_interrupt_at_step_3_of_10(lm, right, monkeypatch, where, late):
    target, name, tokens = STEPS[where]
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(target, name, raising(getattr(target, name), KeyboardInterrupt(), at=3, late=late))
        with pytest.raises(KeyboardInterrupt):
            generate(lm)
        count = tokens + (where == "deliver" and late)
        assert_partial(lm, right, count, RequestStatus.CANCELLED, "cancelled")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_b40_an_interrupt_while_block_tables_are_written(lm, right, monkeypatch, late):
    # Called at each step, mostly with nothing to write; the one prompt of 9 tokens takes its fourth block at step 5.
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(
            ModelDevice, "update_table", raising(ModelDevice.update_table, KeyboardInterrupt(), at=5, late=late)
        )
        with pytest.raises(KeyboardInterrupt):
            generate(lm)
        assert_partial(lm, right, 4, RequestStatus.CANCELLED, "cancelled")


@pytest.mark.parametrize("key", ["table", "decode"])
def test_b40_an_interrupt_that_loses_the_donated_arrays(lm, right, monkeypatch, key):
    """The program ran, so its inputs are gone, and its outputs were never stored."""
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        lost = list(lm.session.device.cache.kv) if key == "decode" else [lm.session.device.slots.table]
        real = ModelDevice._program

        def program(self, wanted):
            call = real(self, wanted)
            hit = wanted == key or getattr(wanted, "kind", None) == key
            return raising(call, KeyboardInterrupt(), at=1, late=True) if hit else call

        patched.setattr(ModelDevice, "_program", program)
        with pytest.raises(KeyboardInterrupt):
            generate(lm)
        assert all(array.is_deleted() for array in lost)
        assert_partial(lm, right, 1 if key == "decode" else 0, RequestStatus.CANCELLED, "cancelled")


def test_b40_an_interrupt_in_the_progress_bar(lm, right, monkeypatch):
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        bar = progress.bar_class(show=True)
        patched.setattr(bar, "update", raising(bar.update, KeyboardInterrupt(), at=3))
        with pytest.raises(KeyboardInterrupt):
            generate(lm, progress_bar=True)
        assert_partial(lm, right, 3, RequestStatus.CANCELLED, "cancelled")


def test_b40_an_interrupt_between_two_submissions(lm, right, monkeypatch):
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(engine.Engine, "submit", raising(engine.Engine.submit, KeyboardInterrupt(), at=3))
        with pytest.raises(KeyboardInterrupt):
            generate(lm)
        assert [output.status for output in lm.last_outputs.values()][:2] == [RequestStatus.CANCELLED] * 2
        assert not any(output.generated_tokens for output in lm.last_outputs.values())


def test_b40_an_interrupt_while_tracing(lm, right, monkeypatch):
    check_interrupted_warmup(lm, right, monkeypatch, ModelDevice, "_lower", KeyboardInterrupt())


def test_b40_an_interrupt_between_two_compiled_programs(lm, right, monkeypatch):
    check_interrupted_warmup(lm, right, monkeypatch, progress.bar_class(show=True), "update", KeyboardInterrupt())


def test_b40_an_exception_in_the_compiler(lm, right, monkeypatch):
    check_interrupted_warmup(lm, right, monkeypatch, programs, "_compile", RuntimeError("out of memory"))


def check_interrupted_warmup(lm, right, monkeypatch, target, name, error):
    lm.close()
    threads = threading.enumerate()
    with monkeypatch.context() as patched:
        patched.setattr(target, name, raising(getattr(target, name), error, at=3))
        with pytest.raises(type(error)):
            generate(lm, progress_bar=True)
    assert threading.enumerate() == threads
    assert len(lm.session.device.programs) < 4
    assert not any(output.generated_tokens for output in lm.last_outputs.values())
    assert [output.generated_tokens for output in generate(lm)] == right
    assert len(lm.session.device.programs) == 4


def test_b40_an_interrupt_while_closing_the_session(lm, right, monkeypatch):
    generate(lm)
    with monkeypatch.context() as patched:
        patched.setattr(
            PagedAttentionCache, "close", raising(PagedAttentionCache.close, KeyboardInterrupt(), at=1, late=True)
        )
        with pytest.raises(KeyboardInterrupt):
            lm.close()
    assert [output.generated_tokens for output in generate(lm)] == right


def test_b40_an_interrupt_in_a_stream(lm, right, monkeypatch):
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "forward", raising(ModelDevice.forward, KeyboardInterrupt(), at=3))
        got = []
        with pytest.raises(KeyboardInterrupt):
            got.extend(output.generated_tokens for output in lm.stream(PROMPTS[0], GREEDY, CONFIG))
        assert_partial(lm, right[:1], 2, RequestStatus.CANCELLED, "cancelled")


def test_b40_an_exception_inside_the_model_step(lm, right, monkeypatch):
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "forward", raising(ModelDevice.forward, RuntimeError("device lost"), at=3))
        with pytest.raises(RuntimeError, match="device lost"):
            generate(lm)
        assert_partial(lm, right, 2, RequestStatus.FAILED, "failed")
        assert all("device lost" in output.error for output in lm.last_outputs.values())


@pytest.mark.parametrize("ahead", [{}, {"async_depth": 3, "decode_window": 2}], ids=["sync", "ahead"])
def test_b40_a_step_that_fails_once_it_runs_leaves_no_broken_store(lm, right, monkeypatch, ahead):
    """The error comes with the answers; what was dispatched behind it takes its arrays and fails, too."""

    def fails(array):
        raise RuntimeError("out of memory")

    broken = jax.jit(lambda a: jax.pure_callback(fails, jax.ShapeDtypeStruct(a.shape, a.dtype), a))
    forward, calls = ModelDevice.forward, 0

    def fail_at_step_3(device, batch, bucket):
        nonlocal calls
        calls += 1
        if calls == 3:
            device.cache.kv = [broken(array) for array in device.cache.kv]
        return forward(device, batch, bucket)

    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "forward", fail_at_step_3)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(lm, dataclasses.replace(CONFIG, **ahead))
        assert {output.status for output in lm.last_outputs.values()} == {RequestStatus.FAILED}


def test_b40_what_had_ended_before_the_interrupt_stays_finished(lm, right, monkeypatch):
    with leaves_nothing(lm, right), monkeypatch.context() as patched:
        patched.setattr(ModelDevice, "forward", raising(ModelDevice.forward, KeyboardInterrupt(), at=4))
        configs = [GenerationConfig(max_new_tokens=n, eos_token_id=-1) for n in (10, 2, 10)]
        with pytest.raises(KeyboardInterrupt):
            lm.generate_batch(PROMPTS, configs, CONFIG)
        statuses = [(output.status.name, len(output.generated_tokens)) for output in lm.last_outputs.values()]
        assert statuses == [("CANCELLED", 3), ("FINISHED", 2), ("CANCELLED", 3)]
        assert lm.summary.requests == {"cancelled": 2, "finished": 1}


# Interrupts at any line.

PACKAGE = str(Path(cbjax.__file__).parent)


class LineInterrupt:
    """Raises KeyboardInterrupt at the n-th line that cbjax executes; counts lines.

    `_exclusive` is left out: its lines are those between taking a lock and guarding it, where CPython, which looks for
    signals at calls and loops only, never interrupts.
    """

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def call(self, frame, event, arg):
        ours = frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "_exclusive"
        return self.line if ours else None

    def line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


@pytest.mark.parametrize("ahead", [{}, {"async_depth": 2, "decode_window": 3}], ids=["sync", "ahead"])
def test_b40_an_interrupt_at_any_line(lm, right, ahead):
    config = dataclasses.replace(CONFIG, **ahead)
    generate(lm, config)
    with LineInterrupt() as counter:
        generate(lm, config)
    assert counter.lines > 1000
    points = np.linspace(1, counter.lines, 40).astype(int).tolist()
    interrupted = 0
    for at in points:
        try:
            with LineInterrupt(at):
                generate(lm, config)
        except KeyboardInterrupt:
            interrupted += 1
        assert lm.session.engine.is_idle
        assert lm.session.engine.state.pool.num_free == 64
        assert [output.generated_tokens for output in generate(lm, config)] == right, (
            f"after an interrupt at line event {at}"
        )
    assert interrupted >= 38
