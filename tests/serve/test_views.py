"""The published status as response bodies; test_app.py covers every value over HTTP."""

from dataclasses import replace

from streamlearn.serve.models import JobsView, regimes_view, shifts_view, status_view
from streamlearn.status import Board, Phase, SnapshotStatus, Status

from .doubles import ADAPTATION, RUNNING, Time

JOBS = JobsView(waiting=1, capacity=2)


def test_the_age_of_a_snapshot_is_never_negative() -> None:
    """The wall clock may have been set back since it was written."""
    time = Time()
    future = SnapshotStatus("a", step=1, written_at=time.wall + 60)
    view = status_view(Board(replace(RUNNING, snapshot=future), time.clock()), JOBS, time.clock())
    assert view.last_snapshot is not None
    assert view.last_snapshot.age_s == 0.0


def test_a_degraded_daemon_is_ready_and_says_what_it_cannot_write() -> None:
    time = Time()
    view = status_view(Board(replace(RUNNING, degraded="snapshots: disk full"), time.clock()), JOBS, time.clock())
    assert (view.ready, view.reason, view.degraded, view.jobs) == (True, None, "snapshots: disk full", JOBS)


def test_regimes_that_were_never_scored_have_no_loss() -> None:
    view = status_view(Board(RUNNING, Time().clock()), JOBS, Time().clock())
    assert view.forgetting.loss_by_regime == {"1": 1.25}
    assert [regime.number for regime in regimes_view(RUNNING).regimes] == [1, 3]


def test_every_kind_of_shift_has_a_total() -> None:
    assert shifts_view(Status(Phase.STARTING)).total == {"inputs": 0, "answers": 0}
    answers = replace(ADAPTATION, num_shifts={"answers": 1})
    assert shifts_view(replace(RUNNING, adaptation=answers)).total == {"inputs": 0, "answers": 1}


def test_the_first_regime_is_listed_and_not_counted() -> None:
    """The total is the published count, not the length of the list, which starts with the first regime."""
    first_only = replace(ADAPTATION, shifts=ADAPTATION.shifts[:1], num_shifts={})
    view = shifts_view(replace(RUNNING, adaptation=first_only))
    assert (view.total, len(view.shifts), view.shifts[0].previous) == ({"inputs": 0, "answers": 0}, 1, None)
