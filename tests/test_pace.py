"""The length of windows follows the time that steps take and the time that somebody may be made to wait."""

import pytest

from cbjax.pace import Pace


def measured(pace: Pace, *seconds: float, steps: int = 1) -> Pace:
    """After windows that took as long, one after another."""
    now = 0.0
    for each in seconds:
        pace.measure(steps, dispatched=now, read=now + each)
        now += each
    return pace


def test_windows_begin_once_a_step_was_measured() -> None:
    pace = Pace(max_window=16, max_seconds=1.0)
    assert pace.window() == 1
    assert measured(pace, 0.1).window() == 10


@pytest.mark.parametrize(("seconds", "steps"), [(1e-9, 16), (0.0, 16), (0.01, 10), (0.03, 3), (0.06, 1), (9.0, 1)])
def test_a_window_fits_into_the_time_given(seconds: float, steps: int) -> None:
    assert measured(Pace(max_window=16, max_seconds=0.1 + 1e-9), seconds).window() == steps


def test_no_time_means_single_steps_and_off_is_off() -> None:
    assert measured(Pace(max_window=16, max_seconds=0.0), 0.01).window() == 1
    assert measured(Pace(max_window=1), 1e-6).window() == 1


def test_a_window_counts_with_its_steps_and_newer_measurements_win() -> None:
    pace = measured(Pace(max_window=16), 1.0, steps=10)
    assert pace.step_seconds == pytest.approx(0.1)
    assert measured(pace, *[0.5] * 20).step_seconds == pytest.approx(0.5, rel=0.01)


def test_with_steps_in_flight_one_begins_when_the_one_before_ends() -> None:
    pace = Pace()
    for read in (1.0, 2.0, 3.0):
        pace.measure(1, dispatched=0.0, read=read)
    assert pace.step_seconds == 1.0
