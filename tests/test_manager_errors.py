"""A manager whose loop, requests, or users fail: cases B40, and the defects J1, J2, J5 of another engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from manager_fakes import SECONDS, HashLM, assert_idle, result, right, running_manager

from cbjax import GenerationConfig, RequestStatus
from cbjax.testing import ByteTokenizer

A, B, C = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]


@pytest.fixture
def lm():
    return HashLM(max_requests_per_batch=2)


@pytest.fixture
def manager(lm):
    with running_manager(lm) as manager:
        yield manager


# The loop fails.


def fail_at_third_step(lm, manager):
    """Two requests run, two wait, and the third step raises; all outputs."""
    names = manager.add_requests([A, B, C, C], 200, streaming=True)
    lm.device.wait()
    lm.device.step()
    lm.device.step()
    lm.device.error = RuntimeError("device lost")
    lm.device.free()
    return [result(manager, name) for name in names]


def test_B40_an_error_in_a_step_fails_every_request_with_its_text(lm, manager, caplog):
    lm.device.hold()
    outputs = fail_at_third_step(lm, manager)
    assert [output.status for output in outputs] == [RequestStatus.FAILED] * 4
    assert all("device lost" in output.error for output in outputs)
    assert sorted(len(output.generated_tokens) for output in outputs) == [0, 0, 2, 2]
    for index, output in enumerate(outputs):
        assert output.generated_tokens == right([A, B, C, C][index], index, 200)[: len(output.generated_tokens)]
    assert not manager.is_running()
    assert "device lost" in caplog.text
    with pytest.raises(RuntimeError, match=r"ended by an error \(device lost\): start\(\) it again"):
        manager.add_request(A)
    assert manager.get_result() is None


def test_B40_the_manager_starts_again_after_an_error_on_the_same_store(lm, manager):
    lm.device.hold()
    fail_at_third_step(lm, manager)
    manager.start()
    assert result(manager, manager.add_request(A, "x")).generated_tokens == right(A, 4)
    assert lm.num_sessions == 1


def test_B40_the_model_serves_calls_right_after_an_error(lm, manager):
    lm.device.hold()
    fail_at_third_step(lm, manager)
    (output,) = lm.generate_batch([A]).values()
    assert output.generated_tokens == right(A, 0)


def test_B40_a_device_that_cannot_recover_is_given_up_and_the_next_start_makes_another(lm, manager):
    def recover():
        raise RuntimeError("gone for good")

    lm.device.recover = recover
    lm.device.hold()
    outputs = fail_at_third_step(lm, manager)
    assert [output.status for output in outputs] == [RequestStatus.FAILED] * 4
    assert lm.session is None
    manager.start()
    assert result(manager, manager.add_request(A, "x")).generated_tokens == right(A, 4)
    assert lm.num_sessions == 2


def test_B40_handlers_and_readers_learn_of_the_error(lm, manager):
    lm.device.hold()
    manager.add_requests([A, B], 200, streaming=True, request_ids=["x", "y"])
    lm.device.wait()
    stream, told, done = manager.request_id_iter("x"), [], threading.Event()
    manager.register_result_handler("y", lambda output: (told.append(output), output.is_finished() and done.set()))
    lm.device.step()
    lm.device.error = RuntimeError("device lost")
    lm.device.free()
    *before, last = stream
    assert (last.status, last.generated_tokens) == (RequestStatus.FAILED, right(A, 0)[:1])
    assert not any(output.is_finished() for output in before)
    assert done.wait(SECONDS)
    assert [output.is_finished() for output in told] == [False] * (len(told) - 1) + [True]
    assert "device lost" in told[-1].error


def test_an_error_while_it_stops_ends_it(lm, manager):
    lm.device.hold()
    manager.add_request(A, "x")
    lm.device.wait()
    manager.stop(block=False)
    lm.device.error = MemoryError("no more")
    lm.device.free()
    assert manager.stop(timeout=SECONDS)
    assert "no more" in result(manager, "x").error


@pytest.mark.usefixtures("interruptible")
def test_B40_an_interrupt_while_waiting_leaves_the_manager_as_it_was(lm, manager):
    lm.device.hold()
    manager.add_request(A, "x")
    main = threading.main_thread().ident
    lm.device.wait()
    # Time enough to be waiting; wherever it strikes inside the block, it is caught there.
    interrupter = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))

    def wait():
        interrupter.start()
        manager.get_result("x", timeout=SECONDS)

    with pytest.raises(KeyboardInterrupt):
        wait()
    interrupter.join()
    manager.add_request(B, "y")
    lm.device.free()
    assert result(manager, "x").generated_tokens == right(A, 0)
    assert result(manager, "y").generated_tokens == right(B, 1)


FORGETFUL = """
from cbjax import ContinuousBatchingConfig
from cbjax.testing import tiny_llama

lm = tiny_llama()
config = ContinuousBatchingConfig(block_size=16, num_blocks=32, compilation_cache=False, max_batch_tokens=64)
manager = lm.init_continuous_batching(continuous_batching_config=config)
manager.start()
name = manager.add_request([1, 2, 3], max_new_tokens=200, streaming=True)
next(manager.request_id_iter(name))
print("one token")
"""


def test_a_manager_that_nobody_stops_neither_hangs_nor_disturbs_the_exit():
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", FORGETFUL], cwd=root, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "one token\n", "")


# Requests that are bad.

BAD = {
    "empty": ([], ValueError, "at least one token"),  # J1
    "outside the vocabulary": ([1, 997], ValueError, r"in \[0, 997\)"),
    "negative": ([-1], ValueError, r"in \[0, 997\)"),
    "larger than the pool": ([1] * 300, ValueError, "305 cells .* one request can hold 256"),  # J2
    "larger than the model": ([1] * 4096, ValueError, "4096 positions"),
    "no ids": ([1.5], TypeError, "flat sequence of int"),
    "nested": ([[1, 2], [3]], TypeError, "flat sequence of int"),
    "no prompt": (None, TypeError, "text, chat messages or token ids"),
    "text without a tokenizer": ("text", ValueError, "no tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_J1_J2_a_bad_request_raises_where_it_was_made_and_touches_no_other(lm, manager, case):
    prompt, error, message = BAD[case]
    lm.device.hold()
    manager.add_request(A, "good")
    lm.device.wait()
    with pytest.raises(error, match=message):
        manager.add_request(prompt, "bad")
    lm.device.free()
    assert result(manager, "good").generated_tokens == right(A, 0)
    assert result(manager, manager.add_request(B, "bad")).generated_tokens == right(B, 1)


def test_J1_J2_among_many_the_bad_ones_fail_alone(lm, manager):
    prompts = [A, *(prompt for prompt, _, _ in BAD.values()), B]
    names = manager.add_requests(prompts)
    outputs = [result(manager, name) for name in names]
    assert outputs[0].generated_tokens == right(A, 0)
    assert outputs[-1].generated_tokens == right(B, len(prompts) - 1)
    for output, (_, _, message) in zip(outputs[1:-1], BAD.values(), strict=True):
        assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "failed")
        assert output.generated_tokens == []
        assert message.split(" .* ")[-1].replace("\\", "") in output.error
    assert outputs[1].prompt_ids == []


def test_J2_before_the_first_start_the_pool_is_unknown_and_what_does_not_fit_it_fails_then(lm):
    manager = lm.init_continuous_batching()
    with pytest.raises(ValueError, match="at least one token"):
        manager.add_request([])
    manager.add_request([1] * 300, "large")
    manager.add_request(A, "good")
    told = []
    manager.register_result_handler("large", told.append)
    manager.start()
    assert result(manager, "good").generated_tokens == right(A, 1)
    manager.stop()
    assert [output.status for output in told] == [RequestStatus.FAILED]
    assert "one request can hold 256" in told[0].error


def test_J5_a_prompt_repeated_whose_length_is_a_multiple_of_a_block_and_one(lm, manager):
    prompt = list(range(9))
    names = manager.add_requests([prompt] * 3)
    assert [result(manager, name).generated_tokens for name in names] == [right(prompt, i) for i in range(3)]
    assert result(manager, manager.add_request(prompt)).generated_tokens == right(prompt, 3)


@pytest.mark.parametrize("inputs", [A, "text", None, {"role": "user"}, 5])
def test_inputs_that_are_no_list_of_prompts_are_refused_as_a_whole(manager, inputs):
    with pytest.raises(TypeError, match="list of prompts"):
        manager.add_requests(inputs)
    assert list(manager) == []


SETTINGS = {
    "max_new_tokens 0": ({"max_new_tokens": 0}, ValueError, "at least 1"),
    "max_new_tokens text": ({"max_new_tokens": "4"}, TypeError, "must be an int"),
    "an EOS id outside the vocabulary": ({"eos_token_id": 997}, ValueError, "EOS ids"),
    "an EOS id that is none": ({"eos_token_id": "x"}, TypeError, "eos_token_id"),
    "a dict as config": ({"generation_config": {"max_new_tokens": 3}}, TypeError, "GenerationConfig or None"),
    "streaming text": ({"streaming": "yes"}, TypeError, "streaming must be True or False"),
    "an unknown field": ({"num_return_sequences": 2}, TypeError, "num_return_sequences"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_honoured_are_refused(manager, case):
    settings, error, message = SETTINGS[case]
    with pytest.raises(error, match=message):
        manager.add_request(A, **settings)
    if error is TypeError or "max_new_tokens" in settings:
        with pytest.raises(error, match=message):
            manager.add_requests([A], **settings)
    assert result(manager, manager.add_request(A, "good")).status == RequestStatus.FINISHED


def test_one_config_per_prompt_must_match(manager):
    with pytest.raises(ValueError, match="got 1 for 2 prompts"):
        manager.add_requests([A, B], generation_config=[GenerationConfig()])
    assert list(manager) == []


def test_what_was_handed_in_may_be_changed_afterwards(lm, manager):
    lm.device.hold()
    manager.add_request(B, "first")
    lm.device.wait()
    ids = np.array(A)
    manager.add_request(ids, "x")
    ids[:] = 0
    lm.device.free()
    assert result(manager, "x").generated_tokens == right(A, 1)


class BrokenTokenizer(ByteTokenizer):
    """Cannot encode "?", and cannot decode what follows it."""

    def encode(self, text, *, add_special_tokens=True):
        return [][5] if text == "?" else super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids, *, skip_special_tokens=True):
        raise OSError("no such word")


def test_a_tokenizer_that_raises_fails_its_request_alone():
    lm = HashLM(tokenizer=BrokenTokenizer())
    with lm.continuous_batching_context_manager() as manager:
        with pytest.raises(ValueError, match="cannot be encoded: IndexError"):
            manager.add_request("?")
        told, done = [], threading.Event()
        name = manager.add_request("a", streaming=True)
        manager.register_result_handler(name, lambda output: (told.append(output), output.is_finished() and done.set()))
        assert done.wait(SECONDS)
        assert told[-1].status == RequestStatus.FAILED
        assert "cannot be decoded: OSError: no such word" in told[-1].error
        manager.add_request("b", "b", 200)
        assert manager.cancel_request("b")
        assert result(manager, "b").status == RequestStatus.CANCELLED
        assert manager.is_running()
    assert_idle(lm)
