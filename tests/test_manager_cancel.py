"""Cancelling and naming requests of a manager: cases B38 and B39, and the defects of other engines they stand for."""

from __future__ import annotations

import threading

import pytest
from manager_fakes import SECONDS, HashLM, assert_idle, result, right, run_threads

from cbjax import RequestStatus

A, B, C = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3]
LONG = list(range(20, 44))  # three chunks of 8


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def lm(request):
    return HashLM(depth=request.param, max_batch_tokens=8, max_requests_per_batch=4)


@pytest.fixture
def held(lm):
    """A running manager whose steps are held."""
    manager = lm.init_continuous_batching()
    manager.start()
    lm.device.hold()
    yield manager
    lm.device.free()
    manager.stop(hard_stop=True)
    assert_idle(lm)


def assert_cancelled(output, tokens=()):
    assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
    assert output.generated_tokens == list(tokens)
    assert "cancelled" in output.error
    assert output.is_finished()


def cancel_after(lm, manager, prompt, steps):
    """Cancels a request in its step number `steps`, from 1, while that is held; then lets a second one run alone."""
    manager.add_request(prompt, "x", streaming=True)
    lm.device.wait()
    for _ in range(steps - 1):
        lm.device.step()
    assert manager.cancel_request("x")
    output = result(manager, "x")  # while the step is still held
    lm.device.free()
    manager.add_request(B, "next")
    assert result(manager, "next").generated_tokens == right(B, 1)
    assert lm.engine.state.pool.num_free == 64
    return output


def test_B38_in_the_first_of_three_chunks(lm, held):
    output = cancel_after(lm, held, LONG, 1)
    assert_cancelled(output)
    assert output.prompt_ids == LONG


def test_B38_in_the_last_chunk_between_schedule_and_result(lm, held):
    assert_cancelled(cancel_after(lm, held, LONG, 3))


def test_B38_in_decode(lm, held):
    # With a step in flight, the answer of the last one has not been read either.
    assert_cancelled(cancel_after(lm, held, A, 4), right(A, 0)[: 3 - lm.depth])


def test_B38_while_waiting(lm, held):
    names = held.add_requests([A] * 4 + [[1, 2]])  # as submitted: descending
    lm.device.wait()
    lm.device.step()
    assert held.cancel_request(names[4])
    assert_cancelled(result(held, names[4]))
    lm.device.free()
    assert [result(held, name).generated_tokens for name in names[:4]] == [right(A, i) for i in range(4)]


def test_B38_before_the_loop_has_seen_it(lm, held):
    held.add_request(A, "runs")
    lm.device.wait()
    held.add_request(B, "new")
    assert held.cancel_request("new")
    assert_cancelled(result(held, "new"))
    lm.device.free()
    assert result(held, "runs").generated_tokens == right(A, 0)
    assert lm.engine.stats.prefill_tokens == len(A)


def test_B38_before_start(lm):
    manager = lm.init_continuous_batching()
    manager.add_request(A, "x")
    told = []
    manager.register_result_handler("x", told.append)
    assert manager.cancel_request("x")
    assert_cancelled(told[0])
    manager.add_request(B, "y")
    manager.start()
    assert result(manager, "y").generated_tokens == right(B, 1)
    manager.stop()
    assert len(told) == 1
    assert_idle(lm)


def test_B38_twice_unknown_and_after_the_end_answer_false_and_do_nothing(lm, held):
    assert not held.cancel_request("nobody")
    held.add_request(A, "x")
    lm.device.wait()
    assert held.cancel_request("x")
    assert not held.cancel_request("x")
    lm.device.free()
    assert_cancelled(result(held, "x"))
    held.add_request(A, "y")
    output = result(held, "y")
    assert not held.cancel_request("y")
    assert (output.status, output.generated_tokens) == (RequestStatus.FINISHED, right(A, 1))


def test_B38_all_at_once_from_many_threads(lm, held):
    names = held.add_requests([A, B, C, LONG] * 4, streaming=True)
    lm.device.wait()
    for _ in range(3):
        lm.device.step()
    answers = []
    run_threads(*[lambda name=name: answers.append(held.cancel_request(name)) for name in names * 2])
    assert sorted(answers) == [False] * 16 + [True] * 16
    for index, name in enumerate(names):
        output = result(held, name)
        assert_cancelled(output, right([A, B, C, LONG][index % 4], index)[: len(output.generated_tokens)])
    assert list(held) == []
    lm.device.free()


def test_B38_neighbours_are_not_changed(lm, held):
    held.add_requests([A, B, C], request_ids=["a", "b", "c"])
    lm.device.wait()
    for _ in range(2):
        lm.device.step()
    held.cancel_request("b")
    lm.device.free()
    assert result(held, "a").generated_tokens == right(A, 0)
    assert result(held, "c").generated_tokens == right(C, 2)


def test_B38_a_reader_sees_no_token_after_the_cancel_and_then_the_end(lm, held):
    """Also defect: an iterator on a cancelled request never ended."""
    held.add_request(A, "x", streaming=True)
    stream = held.request_id_iter("x")
    lm.device.wait()
    for _ in range(3 + lm.depth):
        lm.device.step()
    first = next(stream)
    held.cancel_request("x")
    lm.device.free()
    rest = list(stream)
    assert [len(output.generated_tokens) for output in (first, *rest)] == [1, 2, 3]
    assert [output.status.name for output in (first, *rest)] == ["DECODING", "DECODING", "CANCELLED"]
    assert rest[-1].generated_tokens == right(A, 0)[:3]


def test_B38_a_waiter_is_woken_by_the_cancel(lm, held):
    held.add_request(A, "x")
    lm.device.wait()
    outputs, waits = [], threading.Event()

    def wait():
        waits.set()
        outputs.append(held.get_result("x", timeout=SECONDS))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(SECONDS)
    held.cancel_request("x")
    thread.join(SECONDS)
    assert_cancelled(outputs[0])


def test_J4_the_last_active_request_is_cancelled_after_a_soft_reset_and_a_graceful_stop_ends():
    lm = HashLM(num_blocks=6)
    manager = lm.init_continuous_batching()
    manager.start()
    lm.device.hold()
    prompts = [list(range(8)), list(range(10, 18))]
    manager.add_requests(prompts, 16, request_ids=["a", "b"])
    lm.device.wait()
    while not any(request.num_soft_resets for request in lm.engine.alive.values()):
        lm.device.step()
    assert lm.engine.state.num_active == 1
    (active,) = [r for r in lm.engine.alive.values() if r.status != RequestStatus.PENDING]
    (reset,) = [r for r in lm.engine.alive.values() if r.num_soft_resets]
    tokens = list(active.generated_tokens)
    manager.add_request([9, 9], "new")
    assert manager.cancel_request(active.request_id)
    lm.device.free()
    assert manager.stop(timeout=SECONDS)
    assert_cancelled(result(manager, active.request_id), tokens)
    index = "ab".index(reset.request_id)
    output = result(manager, reset.request_id)
    assert (output.generated_tokens, output.num_soft_resets) == (right(prompts[index], index, 16), 1)
    assert result(manager, "new").generated_tokens == right([9, 9], 2)
    assert_idle(lm)


# B39 and J3: names.


def test_B39_J3_a_name_in_use_is_refused_and_its_owner_is_not_harmed(lm, held):
    held.add_request(A, "a")
    lm.device.wait()
    with pytest.raises(ValueError, match="'a' is in use"):
        held.add_request(B, "a")
    with pytest.raises(ValueError, match="'a' is in use"):
        held.add_requests([B, C], request_ids=["b", "a"])
    with pytest.raises(ValueError, match="more than once: 'c'"):
        held.add_requests([B, C], request_ids=["c", "c"])
    lm.device.free()
    assert result(held, "a").generated_tokens == right(A, 0)
    assert list(held) == []


def test_B39_cancel_and_add_the_same_name_before_the_next_step(lm, held):
    held.add_request(A, "a")
    lm.device.wait()
    lm.device.step()
    assert held.cancel_request("a")
    held.add_request(B, "a")
    lm.device.free()
    assert_cancelled(result(held, "a"), right(A, 0)[: 1 - lm.depth])
    assert result(held, "a").generated_tokens == right(B, 1)


def test_B39_a_cancel_is_bound_to_the_request_not_to_its_name(lm, held):
    """ "a" ends in the very step in which it is cancelled; then another "a" runs."""
    held.add_request(A, "a", 1)
    lm.device.wait()
    assert held.cancel_request("a")
    held.add_request(B, "a")
    lm.device.free()
    assert_cancelled(result(held, "a"))
    assert result(held, "a").generated_tokens == right(B, 1)


def test_B39_a_name_is_free_right_after_the_end(lm, held):
    lm.device.free()
    for index in range(3):
        held.add_request(A, "a")
        assert result(held, "a").generated_tokens == right(A, index)


def test_B39_results_of_one_name_come_in_the_order_of_submission(lm, held):
    lm.device.free()
    held.add_request(A, "a")
    held.cancel_request("a")  # cancelled now, or ended before: either way the name is free
    held.add_request(B, "a")
    first, second = result(held, "a"), result(held, "a")
    assert (first.prompt_ids, second.prompt_ids) == (A, B)
    assert second.generated_tokens == right(B, 1)


def test_B39_automatic_names_avoid_those_that_users_chose(lm, held):
    lm.device.free()
    mine = held.add_request(A, "req_1")
    names = [held.add_request(B) for _ in range(3)]
    assert len({mine, *names}) == 4
    assert result(held, "req_1").generated_tokens == right(A, 0)
    assert [result(held, name).generated_tokens for name in names] == [right(B, i) for i in (1, 2, 3)]


@pytest.mark.parametrize("name", [5, b"x", ["x"]])
def test_B39_a_name_that_is_no_str_is_refused(lm, held, name):
    with pytest.raises(ValueError, match="one str per prompt"):
        held.add_request(A, name)
