"""Public failures of engines like ours, by their ids: the engine over the history-hash device."""

from __future__ import annotations

import numpy as np
import pytest
from engines import assert_clean, expected, finish, make_engine, submit
from machines import DEPTHS, make_prompt

from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.engine import Device
from cbjax.requests import RequestStatus
from cbjax.scheduler import TableDelta

# B12: output after recompute is incomplete, or repeats tokens already streamed.


@pytest.mark.parametrize("depth", DEPTHS)
def test_B12_every_token_is_delivered_once_and_prompts_stay_what_they_were(depth: int) -> None:
    engine = make_engine(depth=depth, num_blocks=7)
    requests = [submit(engine, f"r{i}", make_prompt(2, i), 16) for i in range(5)]
    prompts = [request.prompt.tolist() for request in requests]
    streams: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while not engine.is_idle:
        touched = engine.step()
        assert len({id(request) for request in touched}) == len(touched)
        for request in touched:
            stream = streams[request.request_id]
            assert len(request.generated_tokens) > len(stream), "told without a new token or an end"
            assert request.generated_tokens[: len(stream)] == stream
            stream += request.generated_tokens[len(stream) :]
    assert {request.num_soft_resets for request in requests} == {0, 1, 2, 3}
    for request, prompt in zip(requests, prompts, strict=True):
        assert streams[request.request_id] == request.generated_tokens == expected(request)
        assert request.prompt.tolist() == request.snapshot().prompt_ids == prompt


# B30: zero becomes the default.


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_B30_no_token_or_fewer_is_refused(max_new_tokens: int) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1; got {max_new_tokens}"):
        submit(engine, "a", 5, max_new_tokens)
    assert_clean(engine)


@pytest.mark.parametrize("max_new_tokens", [2.5, True, "4"])
def test_B30_a_number_of_tokens_that_is_no_int_is_refused(max_new_tokens) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="max_new_tokens must be an int or None"):
        submit(engine, "a", 5, max_new_tokens)
    assert_clean(engine)


# B31: a prompt at the context limit.


@pytest.mark.parametrize(("prompt", "asked", "got"), [(31, 8, 1), (31, 1, 1), (31, None, 1), (24, 8, 8), (24, 9, 8)])
def test_B31_the_last_position_is_an_end_by_length(prompt: int, asked: int | None, got: int) -> None:
    engine = make_engine(max_positions=32)
    request = submit(engine, "a", prompt, asked)
    finish(engine)
    assert request.generated_tokens == expected(request)
    assert (len(request.generated_tokens), request.finish_reason) == (got, "length")


@pytest.mark.parametrize("prompt", [32, 33])
def test_B31_a_prompt_without_room_for_a_token_is_refused_with_both_numbers(prompt: int) -> None:
    engine = make_engine(max_positions=32)
    with pytest.raises(ValueError, match=f"32 positions and the prompt has {prompt} tokens"):
        submit(engine, "a", prompt, 1)
    assert_clean(engine)


# B38: cancel at every moment.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("moment", range(14))
def test_B38_cancel_at_every_moment(moment: int, depth: int) -> None:
    engine = make_engine(depth=depth, num_blocks=8, max_batch_tokens=8, max_requests_per_batch=2)
    first = submit(engine, "a", make_prompt(20, 1), 5)
    others = [submit(engine, "b", make_prompt(6, 2), 9), submit(engine, "c", make_prompt(7, 3), 4)]
    for _ in range(moment):
        engine.step()
    before, was_alive = list(first.generated_tokens), first.uid in engine.alive
    got = engine.cancel("a")
    assert got is (first if was_alive else None)
    assert engine.cancel("a") is None
    assert engine.cancel("nobody") is None
    if was_alive:
        assert (first.status, first.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
        assert first.ended is not None
    finish(engine)
    assert first.generated_tokens == before == expected(first)[: len(before)]
    for other in others:
        assert other.generated_tokens == expected(other)


@pytest.mark.parametrize("depth", DEPTHS)
def test_B38_cancelling_the_last_one_leaves_an_idle_engine(depth: int) -> None:
    engine = make_engine(depth=depth)
    submit(engine, "a", 9, 30)
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    assert not engine.alive
    for _ in range(2):
        engine.step()
    assert_clean(engine)
    assert engine.step() == []


# B39: the same id twice.


@pytest.mark.parametrize("depth", DEPTHS)
def test_B39_an_id_is_refused_while_it_is_alive_and_free_after_its_end(depth: int) -> None:
    engine = make_engine(depth=depth)
    first = submit(engine, "a", make_prompt(5, 1), 4)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"request_id 'a' is in use"):
            submit(engine, "a", make_prompt(6, 2), 2)
        engine.step()
    while first.uid in engine.alive:
        engine.step()
    second = submit(engine, "a", make_prompt(6, 2), 3)
    finish(engine)
    assert first.generated_tokens == expected(first)
    assert second.generated_tokens == expected(second)


@pytest.mark.parametrize("depth", DEPTHS)
def test_B39_a_cancelled_id_can_be_given_again_before_the_next_step(depth: int) -> None:
    engine = make_engine(depth=depth)
    first = submit(engine, "a", make_prompt(5, 1), 9)
    for _ in range(4):
        engine.step()
    had = list(first.generated_tokens)
    engine.cancel("a")
    second = submit(engine, "a", make_prompt(7, 2), 5)
    finish(engine)
    assert first.generated_tokens == had
    assert second.generated_tokens == expected(second)
    assert (first.status, second.status) == (RequestStatus.CANCELLED, RequestStatus.FINISHED)


# B40: an interrupt in the middle.


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("steps", range(7))
def test_B40_abort_in_the_middle_holds_nothing_and_the_next_run_is_right(steps: int, depth: int) -> None:
    engine = make_engine(depth=depth, num_blocks=7, max_batch_tokens=8)
    requests = [submit(engine, f"r{i}", make_prompt(5, i), 8) for i in range(4)]
    for _ in range(steps):
        engine.step()
    had = [list(request.generated_tokens) for request in requests]
    ended = engine.abort(RequestStatus.CANCELLED, "cancelled")
    assert ended == requests
    assert_clean(engine)
    assert [request.generated_tokens for request in requests] == had
    assert all((r.status, r.finish_reason) == (RequestStatus.CANCELLED, "cancelled") for r in requests)
    assert engine.abort(RequestStatus.CANCELLED, "cancelled") == []
    again = [submit(engine, f"r{i}", make_prompt(6, 10 + i), 7) for i in range(4)]
    finish(engine)
    for request in again:
        assert request.generated_tokens == expected(request)


class Interrupted:
    """A device that is interrupted at one place of a step: "update_table", "forward", or when an "answer" is read."""

    def __init__(self, device: Device, where: str) -> None:
        self.device, self.where = device, where

    def at(self, where: str) -> None:
        if where == self.where:
            raise KeyboardInterrupt

    def update_table(self, delta: TableDelta) -> None:
        self.at("update_table")
        self.device.update_table(delta)

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> Interrupted:
        self.at("forward")
        self.device.forward(batch, bucket)
        return self

    @property
    def tokens(self) -> np.ndarray:
        self.at("answer")
        raise AssertionError("the interrupt was to come before")

    def recover(self) -> None:
        self.device.recover()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("where", ["update_table", "forward", "answer"])
def test_B40_an_interrupt_inside_a_step_can_be_aborted(where: str, depth: int) -> None:
    engine = make_engine(depth=depth, num_blocks=16)
    requests = [submit(engine, f"r{i}", make_prompt(5, i), 8) for i in range(4)]
    healthy = engine.device
    if where == "answer":
        engine.device = Interrupted(healthy, where)
        for _ in range(depth):
            engine.step()
    else:
        for _ in range(3):
            engine.step()
        engine.device = Interrupted(healthy, where)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.device = healthy
    assert engine.abort(RequestStatus.FAILED, "failed", "interrupted") == requests
    assert {request.error for request in requests} == {"interrupted"}
    assert_clean(engine)
    again = submit(engine, "r0", make_prompt(9, 9), 5)
    finish(engine)
    assert again.generated_tokens == expected(again)


def test_B40_requests_that_had_ended_keep_their_end() -> None:
    engine = make_engine()
    short, long = submit(engine, "a", 4, 1), submit(engine, "b", 4, 9)
    engine.step()
    assert engine.abort(RequestStatus.CANCELLED, "cancelled") == [long]
    assert (short.status, short.finish_reason) == (RequestStatus.FINISHED, "length")


def test_B40_an_interrupt_just_behind_the_end_of_a_request_keeps_that_end() -> None:
    engine = make_engine()
    first, second = submit(engine, "a", 4, 5), submit(engine, "b", 4, 9)
    engine.step()
    first.end(RequestStatus.FINISHED, "stop", first.created + 1.0)  # and no time to forget it
    engine.abort(RequestStatus.CANCELLED, "cancelled")
    assert_clean(engine)
    assert (first.status, first.finish_reason) == (RequestStatus.FINISHED, "stop")
    assert second.status is RequestStatus.CANCELLED
