"""The manager's life: start, stop, settings, and what a model may do meanwhile."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from manager_fakes import SECONDS, HashLM, assert_idle, result, right, running_manager

from cbjax import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, RequestStatus

A, B, C = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]


@pytest.fixture
def lm():
    return HashLM()


@pytest.fixture
def manager(lm):
    with running_manager(lm) as manager:
        yield manager


# Life.


def test_it_finishes_what_was_submitted_before_it_stops(lm):
    manager = lm.init_continuous_batching()
    assert not manager.is_running()
    manager.start()
    assert manager.is_running()
    assert lm.manager is manager
    names = manager.add_requests([A, B, C] * 10)  # more than fit a batch
    assert manager.stop()
    assert not manager.is_running()
    outputs = [result(manager, name) for name in names]
    assert [output.generated_tokens for output in outputs] == [right([A, B, C][i % 3], i) for i in range(30)]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_idle(lm)


def test_a_hard_stop_gives_every_request_its_one_cancelled_output(lm):
    manager = lm.init_continuous_batching()
    manager.start()
    lm.device.hold()
    names = manager.add_requests([A] * 20, streaming=True)  # the batch has 8
    lm.device.wait()
    lm.device.step()
    manager.stop(block=False, hard_stop=True)
    streams = [manager.request_id_iter(name) for name in names]
    lm.device.free()
    assert manager.stop(timeout=SECONDS)
    for index, stream in enumerate(streams):
        outputs = list(stream)
        assert [output.status for output in outputs if output.is_finished()] == [RequestStatus.CANCELLED]
        assert outputs[-1].generated_tokens == right(A, index)[: len(outputs[-1].generated_tokens)]
        assert "stopped" in outputs[-1].error
    assert list(manager) == []
    assert_idle(lm)


def test_a_graceful_stop_can_be_turned_into_a_hard_one(lm):
    manager = lm.init_continuous_batching()
    manager.start()
    lm.device.hold()
    manager.add_request(A, "x", 200)
    lm.device.wait()
    assert not manager.stop(timeout=0.01)
    assert not manager.stop(block=False)
    assert manager.is_running()
    with pytest.raises(RuntimeError, match="stopped: start"):
        manager.add_request(A)
    assert not manager.stop(block=False, hard_stop=True)
    lm.device.free()
    assert manager.stop(timeout=SECONDS)
    assert result(manager, "x").status == RequestStatus.CANCELLED
    assert_idle(lm)


def test_it_can_be_started_again_and_uses_the_same_session(lm):
    manager = lm.init_continuous_batching()
    for index in range(3):
        manager.start()
        name = manager.add_request(A)
        manager.stop()
        assert result(manager, name).generated_tokens == right(A, index)
    assert lm.num_sessions == 1
    assert_idle(lm)


def test_start_waits_for_the_loop_that_still_stops(lm):
    manager = lm.init_continuous_batching()
    manager.start()
    lm.device.hold()
    manager.add_request(A, "old")
    lm.device.wait()
    manager.stop(block=False)
    starter = threading.Thread(target=manager.start)
    starter.start()
    lm.device.free()
    starter.join(SECONDS)
    manager.add_request(B, "new")
    assert result(manager, "old").generated_tokens == right(A, 0)
    assert result(manager, "new").generated_tokens == right(B, 1)
    manager.stop()
    assert_idle(lm)


def test_start_while_it_runs_changes_nothing(lm, manager, caplog):
    manager.start()
    assert "running already" in caplog.text
    assert [t.name for t in threading.enumerate()].count("cbjax-manager") == 1


def test_requests_before_the_first_start_wait_for_it(lm):
    manager = lm.init_continuous_batching()
    names = manager.add_requests([A, B])
    assert manager.get_result(names[0]) is None
    assert manager.get_result() is None
    with pytest.raises(RuntimeError, match="start"):
        next(manager.request_id_iter(names[0]))
    manager.start()
    assert [result(manager, name).generated_tokens for name in names] == [right(A, 0), right(B, 1)]
    manager.stop()


def test_stop_before_start_is_no_error_and_a_hard_one_cancels(lm):
    manager = lm.init_continuous_batching()
    manager.add_request(A, "x")
    assert manager.stop()
    assert manager.stop(hard_stop=True)
    assert manager.get_result("x").status == RequestStatus.CANCELLED


def test_destroy_is_final_and_can_be_repeated(lm, manager):
    lm.device.hold()
    manager.add_request(A, "x", streaming=True)
    lm.device.wait()
    stream = manager.request_id_iter("x")
    lm.device.free()
    manager.destroy()
    assert list(stream)[-1].is_finished()
    assert lm.session is None
    assert manager.get_result() is None
    manager.destroy()
    for call in (manager.start, manager.warmup, partial(manager.add_request, A), partial(manager.add_requests, [A])):
        with pytest.raises(RuntimeError, match="was destroyed: make a new one"):
            call()
    with lm.continuous_batching_context_manager() as fresh:
        assert result(fresh, fresh.add_request(A, "y")).generated_tokens == right(A, 0)


def test_the_context_manager_finishes_and_results_can_be_had_afterwards(lm):
    with lm.continuous_batching_context_manager() as manager:
        names = manager.add_requests([A, B])
    assert not manager.is_running()
    assert [result(manager, name).generated_tokens for name in names] == [right(A, 0), right(B, 1)]
    assert_idle(lm)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_context_manager_cancels_what_is_left(lm, error):
    def use():
        with lm.continuous_batching_context_manager() as manager:
            managers.append(manager)
            lm.device.hold()
            manager.add_request(A, "x", 200)
            lm.device.wait()
            threading.Timer(0.01, lm.device.free).start()
            raise error

    managers = []
    with pytest.raises(error):
        use()
    assert result(managers[0], "x").status == RequestStatus.CANCELLED
    assert_idle(lm)


def test_the_context_manager_says_that_it_did_not_wait_to_the_end(lm, caplog):
    with lm.continuous_batching_context_manager(timeout=0.01) as manager:
        lm.device.hold()
        manager.add_request(A, "x")
        lm.device.wait()
    assert "still runs after timeout=0.01" in caplog.text
    lm.device.free()
    assert result(manager, "x").generated_tokens == right(A, 0)
    manager.stop()


def test_one_manager_of_a_model_runs_at_a_time_and_calls_are_refused_meanwhile(lm, manager):
    other = lm.init_continuous_batching()
    calls = (other.start, other.warmup, partial(lm.generate_batch, [A]), partial(next, lm.stream(A)), lm.close)
    for call in calls:
        with pytest.raises(RuntimeError, match="one KV store"):
            call()
    assert result(manager, manager.add_request(A, "x")).generated_tokens == right(A, 0)
    manager.stop()
    (output,) = lm.generate_batch([A]).values()
    assert output.generated_tokens == right(A, 0)
    other.start()
    other.stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [("generation_config", {}), ("continuous_batching_config", GenerationConfig()), ("workload_hints", 3)],
)
def test_an_argument_of_another_type_is_refused(lm, name, value):
    with pytest.raises(TypeError, match=f"{name} must be a"):
        lm.init_continuous_batching(**{name: value})


# Settings.


def test_settings_go_from_the_model_over_the_manager_to_the_request(lm):
    manager = lm.init_continuous_batching(GenerationConfig(max_new_tokens=4, eos_token_id=-1))
    manager.start()
    stop = right(A, 3)[1]
    names = [
        manager.add_request(A),
        manager.add_request(A, max_new_tokens=2),
        manager.add_request(A, generation_config=GenerationConfig(max_new_tokens=5, seed=3)),
        manager.add_request(A, eos_token_id=[stop]),
    ]
    assert [result(manager, name).generated_tokens for name in names] == [
        right(A, 0, 4),
        right(A, 1, 2),
        right(A, 2, 5, seed=3),
        right(A, 3, 4, (stop,)),
    ]
    names = manager.add_requests([A, B], 3, generation_config=[GenerationConfig(), GenerationConfig(seed=1)])
    assert [result(manager, name).generated_tokens for name in names] == [right(A, 4, 3), right(B, 5, 3, seed=1)]
    manager.stop()


@pytest.mark.parametrize("sharing", [False, True])
def test_common_prefixes_are_submitted_together_longest_first_and_seeds_follow_the_inputs(sharing):
    lm = HashLM()
    config = ContinuousBatchingConfig(seed=7, allow_block_sharing=sharing)
    manager = lm.init_continuous_batching(continuous_batching_config=config)
    prompts = [[1, 2], [9], [1, 2, 3, 4], [], [1, 2, 3]]
    names = manager.add_requests(prompts, request_ids=list("abcde"))
    assert names == list("abcde")
    manager.warmup()
    submit, order = lm.engine.submit, []
    lm.engine.submit = lambda name, *args, **settings: (order.append(name), submit(name, *args, **settings))[1]
    manager.start()
    outputs = [result(manager, name) for name in names]
    manager.stop()
    assert "".join(order) == ("bcea" if sharing else "abce")
    for index, output in enumerate(outputs):
        assert output.prompt_ids == prompts[index]
        assert output.generated_tokens == (right(prompts[index], index) if prompts[index] else [])
    assert outputs[3].status == RequestStatus.FAILED


def test_the_name_is_public():
    import cbjax

    assert cbjax.ContinuousBatchingManager is ContinuousBatchingManager
