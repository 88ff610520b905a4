"""A manager's outputs and who gets them: fetching, iteration, streams, handlers, many threads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from functools import partial

import pytest
from manager_fakes import SECONDS, HashLM, result, right, run_threads, running_manager

from cbjax import GenerationConfig, RequestStatus
from cbjax.testing import ByteTokenizer

A, B, C = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]


@pytest.fixture
def lm():
    return HashLM()


@pytest.fixture
def manager(lm):
    with running_manager(lm) as manager:
        yield manager


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
        manager.add_request("text", "x", 80, streaming=True)
        texts = [output.text for output in manager.request_id_iter("x")]
    assert texts[-1] == ByteTokenizer().decode(right(ByteTokenizer().encode("text"), 0, 80))
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


@pytest.mark.parametrize("depth", [0, 2])
def test_windows_are_told_token_by_token_to_handlers_and_readers(depth):
    lm = HashLM(depth=depth, max_window=5)
    with running_manager(lm) as manager:
        lm.device.hold()
        manager.add_request(A, "x", 30, streaming=True)
        lm.device.wait()
        got, stream = [], manager.request_id_iter("x")
        manager.register_result_handler("x", got.append)
        lm.device.free()
        read = list(stream)
        manager.stop()
        tokens = right(A, 0, 30)
        for outputs in (got, read):
            assert [output.generated_tokens for output in outputs] == [tokens[:n] for n in range(1, 31)]
            assert [output.is_finished() for output in outputs] == [False] * 29 + [True]
        assert lm.engine.stats.windows == {5: 5, 4: 1}


def test_a_window_is_no_longer_than_the_latency_that_was_asked_for():
    lm = HashLM(max_window=16)
    lm.pace.step_seconds = lm.continuous_batching_config.max_window_latency
    with running_manager(lm) as manager:
        manager.add_request(A, "x", 2)
        result(manager, "x")
        assert not lm.engine.stats.windows


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
        # What the result of an asyncio future that was cancelled raises is no Exception.
        others = [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit]
        count = len(output.generated_tokens)
        if output.is_finished():
            raise SystemExit
        raise others[count] if count < len(others) else ValueError("the handler's own fault")

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
