"""Threads beside the loop: what is published arrives, and a tracker that fails or hangs holds nothing up."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamlearn import track as tracker_thread
from streamlearn.status import Board, Clock, Phase, Status
from streamlearn.track import TrackedSample, Tracker, Trackers, TrackFile, forget_run

from .kit import ListTracker, status


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def started(folder: Path, *trackers: Tracker) -> tuple[Trackers, Board]:
    board = Board(Status(Phase.STARTING), Clock())
    found = Trackers(trackers, TrackFile(folder), 0.01, lambda: 17.0)
    found.start(board)
    return found, board


def test_what_is_published_is_written_and_the_last_status_too(tmp_path: Path) -> None:
    tracker = ListTracker()
    trackers, board = started(tmp_path, tracker)
    board.publish(status(3))
    wait_for(lambda: len(tracker.samples) == 1)
    assert trackers.status[0].step == 3
    trackers._interval_s = 60.0
    board.publish(Status(Phase.STOPPING, step=9))
    trackers.close()
    trackers.close()
    assert [sample.step for sample in tracker.samples] == [3, 9]
    assert tracker.finished


def test_failures_are_counted_and_what_waited_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each once."""
    monkeypatch.setattr(tracker_thread, "_MIN_BACKOFF_S", 0.02)
    tracker = ListTracker(failures=3)
    trackers, board = started(tmp_path, tracker)
    for step in range(1, 4):
        board.publish(status(step))
        time.sleep(0.02)
    wait_for(lambda: bool(tracker.samples) and not trackers.status[0].pending)
    assert trackers.status[0].failures == 3
    assert trackers.status[0].fault is None
    trackers.close()
    steps = [sample.step for sample in tracker.samples]
    assert steps == sorted(set(steps))


class HungTracker(ListTracker):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Wait until the test has ended."""
        self.entered.set()
        self.released.wait(60)


def test_a_tracker_that_hangs_holds_up_neither_the_others_nor_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_thread, "CLOSE_S", 0.2)
    hung, other = HungTracker(), ListTracker()
    other.name = "other"
    trackers, board = started(tmp_path, hung, other)
    board.publish(status(1))
    assert hung.entered.wait(30)
    board.publish(status(2))
    wait_for(lambda: bool(other.samples) and other.samples[-1].step == 2)
    before = time.monotonic()
    trackers.close()
    assert time.monotonic() - before < 10.0
    hung.released.set()


def test_the_next_process_marks_a_step_that_goes_back(tmp_path: Path) -> None:
    """It is noted before it is written, so a kill between the two is marked too."""
    first = ListTracker(failures=1_000)
    trackers, board = started(tmp_path, first)
    board.publish(status(12))
    wait_for(lambda: trackers.status[0].failures > 0)
    trackers.close()
    second = ListTracker()
    trackers, board = started(tmp_path, second)
    trackers.note_rewind(8)
    board.publish(status(8))
    wait_for(lambda: bool(second.samples))
    trackers.close()
    assert second.samples[0].rewound_to == 8


def test_a_fresh_run_is_another_run(tmp_path: Path) -> None:
    notes = TrackFile(tmp_path)
    notes.note("list", last_step=3)
    assert TrackFile(tmp_path).run == notes.run
    assert TrackFile(tmp_path).get("list", "last_step") == 3
    forget_run(tmp_path)
    assert TrackFile(tmp_path).run != notes.run
