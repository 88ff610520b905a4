"""The reserve model's figures, which are given, and the scheduler's on the same requests."""

import pytest

from cbjax.scheduler import may_admit
from cbjax.simulate.reserve_model import (
    LONG,
    NUM_BLOCKS,
    SHORT,
    ReserveFigures,
    ReserveWorkload,
    reserve_in_scheduler,
    reserve_model,
    reserve_table,
)

GIVEN = [
    (SHORT, 0.0, ReserveFigures(admitted=120, evictions=9, first_eviction=187)),
    (SHORT, 0.15, ReserveFigures(admitted=96, evictions=0, first_eviction=None)),
    (LONG, 0.0, ReserveFigures(admitted=83, evictions=59, first_eviction=187)),
    (LONG, 0.15, ReserveFigures(admitted=33, evictions=13, first_eviction=212)),
]


@pytest.mark.parametrize(("workload", "margin", "figures"), GIVEN)
def test_the_model_gives_the_known_figures(workload: ReserveWorkload, margin: float, figures: ReserveFigures) -> None:
    assert reserve_model(workload, margin) == figures


def test_a_reserve_of_the_whole_pool_runs_one_request_at_a_time() -> None:
    figures = reserve_model(SHORT, 1.0)
    assert figures.evictions == 0
    assert 1 <= figures.admitted <= 3
    run = reserve_in_scheduler(SHORT, 1.0)
    assert (run.admitted, run.evictions, run.peak_rows) == (3, 0, 1)


@pytest.mark.parametrize("margin", [-0.01, 1.01, 2.0, float("nan")])
def test_a_margin_out_of_range_is_refused_by_both(margin: float) -> None:
    for run in (reserve_model, reserve_in_scheduler):
        with pytest.raises(ValueError, match=r"safety_margin must be in \[0, 1\]; got"):
            run(SHORT, margin)


def test_a_reserve_covers_as_many_decodes_as_it_has_blocks_for() -> None:
    assert (SHORT.growth, LONG.growth) == (1, 3)
    admits = [may_admit(free=free, need=1, num_blocks=NUM_BLOCKS, safety_margin=0.15) for free in (9, 10)]
    assert admits == [False, True]


def test_the_scheduler_lets_short_requests_stand_still_and_evicts_none() -> None:
    run = reserve_in_scheduler(SHORT, 0.0)
    assert (run.evictions, run.num_steps) == (0, 600)
    assert run.starved > 0
    # Nobody is lost, so with the reserve more are admitted than the model has.
    assert reserve_in_scheduler(SHORT, 0.15).admitted == 100


@pytest.mark.parametrize(("margin", "admitted", "first"), [(0.0, 38, 438), (0.15, 33, 463)])
def test_the_scheduler_evicts_long_requests_when_nobody_can_go_on(margin: float, admitted: int, first: int) -> None:
    run = reserve_in_scheduler(LONG, margin)
    assert (run.admitted, run.completed, run.first_eviction) == (admitted, 0, first)
    # Until then nothing was evicted and everybody held on to what he had.
    assert run.peak_rows == admitted
    assert run.timeline.running[first - 1] == admitted
    assert run.timeline.live[first - 1] == NUM_BLOCKS


def test_a_reserve_makes_evictions_fewer_and_later_in_both() -> None:
    for run in (reserve_model, reserve_in_scheduler):
        without, with_reserve = run(LONG, 0.0), run(LONG, 0.15)
        assert with_reserve.evictions < without.evictions
        assert without.first_eviction is not None
        assert with_reserve.first_eviction is not None
        assert with_reserve.first_eviction > without.first_eviction


def test_the_table_shows_both_and_that_all_requests_end() -> None:
    lines = [line.split() for line in reserve_table().splitlines()]
    assert len(lines) == 1 + 4 * 3
    assert lines[1] == ["short", "0.00", "model", "120", "9", "187", "-", "-", "600"]
    assert lines[11][:3] == ["scheduler", "33", "12"]
    for soon, end in zip(lines[2::3], lines[3::3], strict=True):
        assert end[:4] == ["to", "the", "end", "120"]
        evictions, _, ended = map(str, end[4:7])
        assert ended == "120"
        assert int(evictions) >= int(soon[2])
