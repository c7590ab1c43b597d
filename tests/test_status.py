"""What the loop publishes, its heartbeat, and the counters of a process."""

import dataclasses
from itertools import pairwise

import pytest

from streamlearn.board import Board, Counters
from streamlearn.status import AdaptationStatus, Phase, Status
from tests.serve.doubles import RUNNING, Time


def counted(counters: Counters, name: str, **labels: str) -> float:
    """The value of a counter."""
    return counters.registry.get_sample_value(f"streamlearn_{name}", labels) or 0.0


def test_counters_begin_at_zero_and_a_rollback_takes_nothing_back() -> None:
    """Work that is repeated counts again."""

    def status(records_trained: int, dead: int, shifts: int) -> Status:
        return Status(
            Phase.RUNNING,
            records_trained=records_trained,
            dead_letters={"empty": dead, "not_json": 7},
            adaptation=AdaptationStatus(num_shifts={"inputs": shifts}),
        )

    counters, found = Counters(), []
    statuses = [status(*row) for row in [(1000, 5, 2), (1010, 6, 2), (900, 4, 1), (905, 5, 2)]]
    for before, now in pairwise(statuses):
        counters.update(before, now)
        found.append(
            (
                counted(counters, "records_trained_total"),
                counted(counters, "records_dead_lettered_total", reason="empty"),
                counted(counters, "shifts_total", kind="inputs"),
            )
        )
    assert found == [(10, 1, 0), (10, 1, 0), (15, 2, 1)]
    assert counted(counters, "records_dead_lettered_total", reason="not_json") == 0


def test_a_status_never_changes_once_published() -> None:
    """Neither through its fields nor through the mapping that was passed in."""
    counts = {"empty": 1}
    board = Board(dataclasses.replace(RUNNING, dead_letters=counts), Time().clock())
    counts["empty"] = 2
    assert board.read().dead_letters == {"empty": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        board.read().step = 1  # type: ignore[misc]
    with pytest.raises(TypeError):  # defaults are shared between instances
        Status(Phase.STARTING).adaptation.num_shifts["a"] = 1  # type: ignore[index]


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


def test_loading_a_backbone_may_take_longer_than_a_step() -> None:
    time = Time()
    board = Board(Status(phase=Phase.RESTORING), time.clock())
    time.monotonic += 599
    assert board.alive
    time.monotonic += 2
    assert not board.alive


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
    board.publish(Status(phase=Phase.FAILED, reason="updates stay non-finite"))
    assert board.why_not_alive() == "the daemon failed: updates stay non-finite"
