import dataclasses
import doctest

import pytest

from streamlearn.status import status as module
from streamlearn.status.board import Board
from streamlearn.status.status import Phase, Status
from streamlearn.status.timing import BUCKETS_S, Timing
from tests.serve.doubles import RUNNING, Time


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_status_never_changes_once_published() -> None:
    """Neither its fields nor the mapping that the publisher keeps."""
    counts = {"empty": 1}
    board = Board(dataclasses.replace(RUNNING, dead_letters=counts), Time().clock())
    counts["empty"] = 2
    assert board.read().dead_letters == {"empty": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        board.read().step = 1  # type: ignore[misc]


def test_publishing_and_beating_are_heartbeats() -> None:
    time = Time()
    board = Board(RUNNING, time.clock())
    time.monotonic += 61
    assert not board.alive
    board.beat()
    assert board.alive
    time.monotonic += 61
    board.publish(RUNNING)
    assert board.alive


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTORING])
def test_loading_a_backbone_may_take_longer_than_a_step(phase: Phase) -> None:
    time = Time()
    board = Board(Status(phase=phase), time.clock())
    time.monotonic += 599
    assert board.alive
    time.monotonic += 2
    assert not board.alive


def test_a_failed_daemon_is_not_alive_however_young_its_heartbeat() -> None:
    board = Board(Status(phase=Phase.FAILED, reason="updates stay non-finite"), Time().clock())
    assert board.why_not_alive() == "the daemon failed: updates stay non-finite"


def test_ready_means_ready_and_alive() -> None:
    time = Time()
    board = Board(RUNNING, time.clock())
    assert board.why_not_ready() is None
    time.monotonic += 70
    assert board.why_not_ready() == "the training loop must report every 60 s, its last report is 70.0 s old"
    board.publish(Status(phase=Phase.RESTORING))
    assert board.why_not_ready() == "the daemon is restoring"
    board.publish(Status(phase=Phase.IDLE, reason="the source is unreachable"))
    assert board.why_not_ready() == "the source is unreachable"


def test_a_timing_sorts_into_buckets_whose_bounds_are_inclusive() -> None:
    timing = Timing().observe(BUCKETS_S[0]).observe(BUCKETS_S[1]).observe(1e9)
    assert timing.counts == (1, 1, *[0] * (len(BUCKETS_S) - 2), 1)
    assert timing.count == 3
    assert timing.last_s == 1e9
