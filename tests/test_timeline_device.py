"""When the device worked, on a clock that a test holds: the timeline's account against the device's own."""

import itertools

import numpy as np
import pytest
from engines import finish
from timed_devices import timed_engine

MS = 1e-3


def run(**settings):
    engine, device, timeline = timed_engine(**settings)
    finish(engine)
    return device, timeline


def test_without_steps_in_flight_the_fraction_is_that_of_the_step_time() -> None:
    device, timeline = run(step_seconds=3 * MS, host_seconds=1 * MS)
    steps = len(device.busy)
    activity = timeline.device_activity
    assert activity.wall == pytest.approx(4 * MS * steps)
    assert activity.active == activity.sure == pytest.approx(3 * MS * steps)
    assert activity.fraction == activity.sure_fraction == pytest.approx(0.75)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_steps_in_flight_only_the_first_dispatch_is_idle_on_a_slow_device(depth: int) -> None:
    device, timeline = run(step_seconds=3.5 * MS, host_seconds=1 * MS, depth=depth)
    activity = timeline.device_activity
    assert activity.wall == pytest.approx(1 * MS + 3.5 * MS * len(device.busy))
    assert activity.active == activity.sure == pytest.approx(3.5 * MS * len(device.busy))


def test_intervals_are_those_of_the_device_where_it_is_the_slower_one() -> None:
    for depth in (0, 1, 2):
        device, timeline = run(step_seconds=3 * MS, host_seconds=1 * MS, depth=depth)
        steps = timeline.steps
        mine = np.stack([steps["device_begin"], steps["device_end"]], axis=1)
        np.testing.assert_allclose(mine, device.busy, rtol=0, atol=1e-9)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_truth_lies_between_what_is_sure_and_what_is_seen(depth: int) -> None:
    for step, host in itertools.product((0.0, 0.2 * MS, 1 * MS, 5 * MS), repeat=2):
        device, timeline = run(step_seconds=step, host_seconds=host, depth=depth)
        activity, steps = timeline.device_activity, timeline.steps
        assert activity.sure <= device.busy_seconds + 1e-9
        assert activity.active >= device.busy_seconds - 1e-9
        assert (steps["device_begin"] <= steps["device_end"]).all()
        assert (steps["device_end"][:-1] <= steps["device_begin"][1:]).all(), "two steps at once"
        assert (steps["device_sure"] <= steps["device_end"] - steps["device_begin"] + 1e-9).all()


def test_a_pause_of_the_caller_is_wall_clock_and_not_sure_to_be_device_time() -> None:
    engine, device, timeline = timed_engine(step_seconds=1 * MS, host_seconds=1 * MS, depth=1)
    engine.step()  # one step is in flight
    device.clock.now += 50 * MS
    finish(engine)
    activity = timeline.device_activity
    assert activity.active == pytest.approx(device.busy_seconds + 49 * MS)
    assert activity.sure <= device.busy_seconds
    assert activity.wall > 50 * MS


def test_answers_that_are_numpy_arrays_ran_during_their_dispatch() -> None:
    engine, device, timeline = timed_engine(step_seconds=0.0, host_seconds=2 * MS)
    device.forward = super(type(device), device).forward
    finish(engine)
    steps = timeline.steps
    assert (steps["device_begin"] == steps["dispatch_begin"]).all()
    assert (steps["device_end"] == steps["dispatch_end"]).all()
    assert timeline.device_activity.sure == 0.0


def test_outputs_are_let_go_of_once_they_are_ready() -> None:
    engine, _, timeline = timed_engine(step_seconds=1 * MS, host_seconds=1 * MS, depth=2)
    finish(engine)
    assert not timeline.recorder._device._steps
    assert not timeline.recorder._open


def test_medians_are_those_of_the_clock_by_program() -> None:
    _, timeline = run(step_seconds=3 * MS, host_seconds=1 * MS)
    *programs, every = timeline.bucket_times()
    assert [row.name for row in programs] == list(timeline.buckets)
    assert every.name == "all"
    assert every.steps == sum(row.steps for row in programs) == timeline.num_steps
    for row in (*programs, every):
        assert row.phases == pytest.approx(
            {"schedule": 0, "build": 0, "dispatch": 1 * MS, "account": 0, "read": 3 * MS, "update": 0}
        )
        assert (row.host, row.device) == pytest.approx((1 * MS, 3 * MS))
    assert "75.0% of wall clock, at least 75.0%" in str(timeline)
    assert str(timeline).splitlines()[-1].split()[-1] == "3.000"
