"""The manager's life, its outputs, and who gets them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from functools import partial

import pytest
from manager_fakes import SECONDS, HashLM, assert_idle, result, right, run_threads

from cbjax import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, RequestStatus
from cbjax.testing import ByteTokenizer

A, B, C = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]


@pytest.fixture
def lm():
    return HashLM()


@pytest.fixture
def manager(lm):
    """Runs, and must end well."""
    manager = lm.init_continuous_batching()
    manager.start()
    yield manager
    lm.device.free()
    manager.stop(hard_stop=True)
    assert_idle(lm)


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


# Fetching.


def test_B41_a_result_is_looked_up_while_others_end_and_swallows_none_of_them(lm, manager):
    lm.device.hold()
    manager.add_requests([A, B, C], request_ids=["slow", "b", "c"], generation_config=[
        GenerationConfig(max_new_tokens=n) for n in (9, 1, 2)
    ])  # fmt: skip
    lm.device.wait()
    got = []
    waiter = threading.Thread(target=lambda: got.append(manager.get_result("slow", timeout=SECONDS)))
    waiter.start()
    lm.device.free()
    waiter.join(SECONDS)
    assert got[0].generated_tokens == right(A, 0, 9)
    assert manager.get_result("c").generated_tokens == right(C, 2, 2)
    assert manager.get_result().generated_tokens == right(B, 1, 1)


def test_a_result_that_does_not_come_in_time_is_none_and_not_lost(lm, manager):
    lm.device.hold()
    manager.add_request(A, "x")
    lm.device.wait()
    assert manager.get_result("x", timeout=0.01) is None
    assert manager.get_result(timeout=0.01) is None
    lm.device.free()
    assert result(manager, "x").generated_tokens == right(A, 0)


def test_a_name_that_is_unknown_or_fetched_is_an_error(manager):
    manager.add_request(A, "x")
    result(manager, "x")
    for name in ("x", "nobody"):
        for call in (
            manager.get_result,
            manager.request_id_iter,
            partial(manager.register_result_handler, callback=print),
        ):
            with pytest.raises(KeyError, match="never submitted, or its output was fetched already"):
                call(name)


def test_a_waiter_without_a_name_is_released_by_the_stop(lm, manager):
    got = []
    waiter = threading.Thread(target=lambda: got.append(manager.get_result()))
    waiter.start()
    manager.stop()
    waiter.join(SECONDS)
    assert got == [None]


def test_iterating_yields_everything_and_ends(lm, manager):
    manager.add_requests([A, B, C], request_ids=["a", "b", "c"])
    assert {output.request_id: output.generated_tokens for output in manager} == {
        "a": right(A, 0),
        "b": right(B, 1),
        "c": right(C, 2),
    }
    assert list(manager) == []
    manager.add_request(A, "d")
    assert [output.request_id for output in manager] == ["d"]
    assert manager.is_running()


def test_iterating_comes_in_the_order_of_the_ends_and_survives_the_stop(lm, manager):
    configs = [GenerationConfig(max_new_tokens=n) for n in (7, 2, 4)]
    manager.add_requests([A, B, C], request_ids=["a", "b", "c"], generation_config=configs)
    manager.stop()
    assert [output.request_id for output in manager] == ["b", "c", "a"]


def test_two_consumers_share_the_results(lm, manager):
    names = manager.add_requests([A] * 40)
    got = [[], []]
    run_threads(*[lambda mine=mine: mine.extend(output.request_id for output in manager) for mine in got])
    assert sorted(got[0] + got[1]) == sorted(names)


# Streams.


def test_B41_three_streams_read_one_after_another_lose_no_token(lm, manager):
    names = manager.add_requests([A, B, C], 8, streaming=True)
    streams = [manager.request_id_iter(name) for name in names]
    slow = [next(streams[1])]
    others = {index: list(streams[index]) for index in (0, 2)}
    slow.extend(streams[1])
    for index, outputs in {1: slow, **others}.items():
        tokens = right([A, B, C][index], index, 8)
        assert [output.generated_tokens for output in outputs] == [tokens[:n] for n in range(1, 9)]
        assert [output.is_finished() for output in outputs] == [False] * 7 + [True]
        assert all(len(output.timestamps) == len(output.generated_tokens) for output in outputs)
    assert list(manager) == []


def test_B41_streams_are_read_by_threads_at_once(lm, manager):
    names = manager.add_requests([A, B, C] * 4, 8, streaming=True)
    got = {}

    def read(name):
        got[name] = [output.generated_tokens[-1] for output in manager.request_id_iter(name)]

    run_threads(*[partial(read, name) for name in names])
    assert got == {name: right([A, B, C][i % 3], i, 8) for i, name in enumerate(names)}


def test_a_request_that_does_not_stream_gives_only_its_end(lm, manager):
    manager.add_request(A, "x")
    (output,) = manager.request_id_iter("x")
    assert output.generated_tokens == right(A, 0)


def test_a_stream_goes_on_if_somebody_else_took_the_result(lm, manager):
    manager.add_request(A, "x", streaming=True)
    stream = manager.request_id_iter("x")
    assert result(manager, "x").generated_tokens == right(A, 0)
    assert [len(output.generated_tokens) for output in stream] == [1, 2, 3, 4, 5, 6]


def test_leaving_a_stream_early_leaves_the_result(lm, manager):
    manager.add_request(A, "x", streaming=True)
    stream = manager.request_id_iter("x")
    next(stream)
    stream.close()
    assert result(manager, "x").generated_tokens == right(A, 0)


def test_streamed_text_grows_and_ends_as_the_text_of_the_output():
    lm = HashLM(tokenizer=ByteTokenizer())
    with lm.continuous_batching_context_manager() as manager:
        manager.add_request("text", "x", 40, streaming=True)
        texts = [output.text for output in manager.request_id_iter("x")]
    assert texts[-1] == ByteTokenizer().decode(right(ByteTokenizer().encode("text"), 0, 40))
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert len(set(texts)) > 5


# Handlers.


def test_a_handler_gets_each_token_of_a_stream_and_only_the_end_of_others(lm, manager):
    lm.device.hold()
    names = manager.add_requests([A, B], request_ids=["s", "t"])
    manager.cancel_request("s")
    manager.add_request(C, "u", streaming=True)
    got = {name: [] for name in (*names, "u")}
    for name, mine in got.items():
        manager.register_result_handler(name, mine.append)
    lm.device.free()
    manager.stop()
    assert [output.status for output in got["s"]] == [RequestStatus.CANCELLED]
    assert [output.generated_tokens for output in got["t"]] == [right(B, 1)]
    assert [output.generated_tokens for output in got["u"]] == [right(C, 2)[:n] for n in range(1, 7)]
    assert [output.is_finished() for output in got["u"]] == [False] * 5 + [True]
    assert list(manager) == []


def test_a_handler_that_is_registered_late_gets_all_tokens_so_far(lm, manager):
    """Also defect: a request that ended before its handler was registered hung its client."""
    manager.add_request(A, "x", 1)
    manager.add_request(B, "y")
    result(manager, "y")
    got, done = [], threading.Event()
    manager.register_result_handler("x", lambda output: (got.append(output), done.set()))
    assert done.wait(SECONDS)
    assert [output.generated_tokens for output in got] == [right(A, 0, 1)]
    manager.add_request(C, "z")
    manager.stop()
    told = []
    manager.register_result_handler("z", told.append)
    assert told[0].generated_tokens == right(C, 2)


def test_a_handler_that_raises_touches_nothing_else(lm, manager, caplog):
    caplog.set_level(logging.ERROR)
    lm.device.hold()
    names = manager.add_requests([A, B, C], streaming=True)

    def fail(output):
        raise SystemExit if output.is_finished() else ValueError("the handler's own fault")

    manager.register_result_handler(names[1], fail)
    lm.device.free()
    assert result(manager, names[0]).generated_tokens == right(A, 0)
    assert result(manager, names[2]).generated_tokens == right(C, 2)
    manager.stop()
    assert caplog.text.count("raised") == 6
    assert "the handler's own fault" in caplog.text


def test_a_handler_may_submit_and_cancel_and_must_not_wait(lm, manager):
    lm.device.hold()
    manager.add_requests([A, B], request_ids=["x", "victim"], generation_config=[
        GenerationConfig(max_new_tokens=1), GenerationConfig(max_new_tokens=200)
    ])  # fmt: skip
    done = threading.Event()

    def handle(output):
        assert manager.cancel_request("victim")
        manager.add_request(C, "child")
        for call in (manager.stop, manager.start, manager.get_result, partial(next, iter(manager)),
                     partial(manager.request_id_iter, "child")):  # fmt: skip
            with pytest.raises(RuntimeError, match="own thread"):
                call()
        manager.stop(block=False)
        done.set()

    manager.register_result_handler("x", handle)
    lm.device.free()
    assert done.wait(SECONDS), "the handler raised"
    assert result(manager, "child").generated_tokens == right(C, 2)
    assert result(manager, "victim").status == RequestStatus.CANCELLED
    manager.stop()


def test_a_second_handler_and_one_that_is_no_plain_function_are_refused(lm, manager):
    async def coroutine(output): ...

    lm.device.hold()
    manager.add_request(A, "x")
    for wrong in (coroutine, 5):
        with pytest.raises(TypeError, match="plain function"):
            manager.register_result_handler("x", wrong)
    manager.register_result_handler("x", lambda output: None)
    with pytest.raises(ValueError, match="has a result handler"):
        manager.register_result_handler("x", print)


def test_B55_in_an_event_loop_handlers_run_on_it_and_calls_need_no_loop_of_their_own(lm, manager):
    async def serve():
        queue, thread = asyncio.Queue(), threading.get_ident()
        manager.add_request(A, "x", streaming=True)
        manager.register_result_handler("x", lambda output: queue.put_nowait((threading.get_ident(), output)))
        outputs = []
        while not outputs or not outputs[-1].is_finished():
            where, output = await asyncio.wait_for(queue.get(), SECONDS)
            assert where == thread
            outputs.append(output)
        manager.add_request(B, "y")
        assert result(manager, "y").generated_tokens == right(B, 1)
        return outputs

    outputs = asyncio.run(serve())
    assert outputs[-1].generated_tokens == right(A, 0)


def test_an_event_loop_that_was_closed_touches_nothing_else(lm, manager, caplog):
    async def register():
        manager.register_result_handler("x", print)

    lm.device.hold()
    manager.add_requests([A, B], request_ids=["x", "y"])
    asyncio.run(register())
    lm.device.free()
    assert result(manager, "y").generated_tokens == right(B, 1)
    manager.stop()
    assert "event loop is closed" in caplog.text


# Threads.


def test_threads_submit_cancel_and_read_at_once(lm, manager):
    def client(number):
        for turn in range(6):
            seed = number * 100 + turn
            name, prompt = f"{number}/{turn}", [number + 1, turn + 1]
            config = GenerationConfig(max_new_tokens=5, seed=seed)
            manager.add_request(prompt, name, streaming=bool(turn % 2), generation_config=config)
            tokens = right(prompt, 0, 5, seed=seed)
            if turn == 2:
                manager.cancel_request(name)
                output = result(manager, name)
                assert output.generated_tokens == tokens[: len(output.generated_tokens)]
            elif turn % 2:
                assert [o.generated_tokens[-1] for o in manager.request_id_iter(name)] == tokens
            else:
                assert result(manager, name).generated_tokens == tokens

    run_threads(*[partial(client, number) for number in range(12)])
    assert list(manager) == []


def test_B55_an_idle_manager_costs_nothing(lm, manager):
    result(manager, manager.add_request(A, "x"))
    waiter = threading.Thread(target=manager.get_result)
    waiter.start()
    steps, before = lm.device.num_steps, time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.01
    assert lm.device.num_steps == steps
    manager.stop()
    waiter.join(SECONDS)


def test_the_name_is_public():
    import cbjax

    assert cbjax.ContinuousBatchingManager is ContinuousBatchingManager
