import dataclasses

import pytest

from streamlearn.status import Board, Phase, Status
from tests.serve.doubles import RUNNING, Time


def test_a_status_never_changes_once_published() -> None:
    """Neither through its fields nor through the mapping that was passed in."""
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


def test_a_failed_daemon_is_not_alive_even_with_a_recent_heartbeat() -> None:
    board = Board(Status(phase=Phase.FAILED, reason="updates stay non-finite"), Time().clock())
    assert board.why_not_alive() == "the daemon failed: updates stay non-finite"


def test_every_publication_and_heartbeat_calls_on_publish() -> None:
    published: list[Status] = []
    board = Board(RUNNING, Time().clock(), on_publish=published.append)
    board.beat()
    board.publish(Status(phase=Phase.STOPPING))
    assert [status.phase for status in published] == [Phase.RUNNING, Phase.RUNNING, Phase.STOPPING]


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
