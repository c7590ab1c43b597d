"""A disk or dead-letter sink that fails for a while: learning continues, nothing is lost, and the time is limited."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import streamlearn.daemon.checkpoint as daemon_module
from connectors.dead_letters import FileDeadLetters
from streamlearn.daemon.process import Degradation
from streamlearn.errors import DeadLetterError, SnapshotError
from streamlearn.events import Event
from streamlearn.settings import Settings
from streamlearn.snapshot.files import Files
from streamlearn.status import Status
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import RUBBISH, StopAfter, backbone, daemon_of, make, opened, records, run
from tests.learners import differences

__all__ = ["backbone", "make"]


class Disk(StopAfter):
    """A disk that fails every durable write while `broken(step)` holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: Callable[[int], bool]) -> None:
        super().__init__(step=-1)
        self._broken_at = broken
        self.broken = False
        self.seen: list[str] = []
        self._write, self._fsync, self._files = os.write, os.fsync, Files.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(Files, "write", self.write_file)
        monkeypatch.setattr(daemon_module, "RETRY_S", 0.0)

    def check(self) -> None:
        if self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, descriptor: int, data: Any) -> int:
        self.check()
        return self._write(descriptor, data)

    def write_file(self, path: Path, data: bytes) -> None:
        self.check()
        self._files(Files(), path, data)

    def on_step(self, batch: Batch, step: Any, status: Status) -> None:
        """Note the published reason; the disk's state changes from the next step on."""
        self.seen.append(status.degraded)
        self.broken = self._broken_at(step.number)


def lines() -> list[bytes]:
    rows = records(48)
    for place in (9, 25, 40):
        rows.insert(place, RUBBISH)
    return rows


def test_learning_outlasts_a_full_disk(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """The status says what fails; the final state is as if it had not, and each dead letter is there once."""
    wanted, _ = run(make(lines(), "whole"))
    settings = make(lines(), "refused")
    with monkeypatch.context() as patch, capture_logs() as logs:
        disk = Disk(patch, broken=lambda step: 2 <= step < 9)
        state, daemon = run(settings, disk)
    assert differences(state, wanted) == []
    assert daemon.state.ledger.rows() == [("stream.jsonl", 0, 48, 3, 0, 0)]
    assert disk.seen[1] == ""
    assert all("No space left" in reason for reason in disk.seen[3:9])
    assert "journal" in disk.seen[4]
    assert "snapshot" in disk.seen[6]
    assert disk.seen[-1] == ""
    told = [
        (log["event"], log["what"])
        for log in logs
        if log["event"] in (Event.DEGRADATION_STARTED, Event.DEGRADATION_ENDED)
    ]
    assert told.count((Event.DEGRADATION_ENDED, "snapshot")) == told.count((Event.DEGRADATION_ENDED, "journal")) == 1
    sink = FileDeadLetters(settings.state / "dead_letters.jsonl")
    letters = (settings.state / "dead_letters.jsonl").read_bytes().splitlines()
    assert len(sink.recall(None)) == len(letters) == 3
    sink.close()


@pytest.mark.parametrize("full", [False, True])
def test_older_snapshots_make_room_on_a_full_disk_only(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    """A dead-letter topic that is away costs none of them."""
    numbers: list[int] = []

    class Sink(Disk):
        def check(self) -> None:
            """The dead letters alone fail."""

        def on_step(self, batch: Batch, step: Any, status: Status) -> None:
            super().on_step(batch, step, status)
            numbers.append(len(daemon.components.store.names()))

    def flush(letters: FileDeadLetters) -> None:
        if sink.broken:
            raise DeadLetterError("unusable records cannot be set aside") from (disk_full if full else None)
        really(letters)

    disk_full, really = OSError(errno.ENOSPC, "No space left on device"), FileDeadLetters.flush
    settings = make(lines())
    snapshot = settings.snapshot.model_copy(update={"every_records": 4, "keep": 8})
    sink = Sink(monkeypatch, broken=lambda step: step == 5)
    monkeypatch.setattr(FileDeadLetters, "flush", flush)
    with opened(settings.model_copy(update={"snapshot": snapshot})) as components:
        daemon = daemon_of(components, sink)
        daemon.run()
    assert numbers[4] > 2
    assert (min(numbers[5:]) == 2) == full


def test_a_disk_that_stays_full_ends_the_run(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit the daemon stops with the disk's error; a restart with free space loses and repeats nothing."""
    wanted, _ = run(make(lines(), "whole"))
    settings = make(lines(), "ended")
    with monkeypatch.context() as patch, opened(settings) as components:
        daemon = daemon_of(components, Disk(patch, broken=lambda step: step >= 5))
        daemon.degradation = Degradation(0.0)
        with pytest.raises((SnapshotError, DeadLetterError), match="No space left"):
            daemon.run()
    state, daemon = run(settings)
    assert differences(state, wanted) == []
    assert daemon.state.ledger.rows() == [("stream.jsonl", 0, 48, 3, 0, 0)]
    letters = (settings.state / "dead_letters.jsonl").read_bytes().splitlines()
    assert len(letters) == 3


def test_a_snapshot_on_request_ends_the_degradation(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one failure hours later would end the process at once."""
    reasons: list[str] = []

    class Requesting(Disk):
        def on_step(self, batch: Batch, step: Any, status: Status) -> None:
            super().on_step(batch, step, status)
            if step.number == 5:
                reasons.append(daemon.degradation.reason)
                daemon.save()
                reasons.append(daemon.degradation.reason)

    settings = make(records(48))
    with opened(settings) as components:
        daemon = daemon_of(components, Requesting(monkeypatch, broken=lambda step: step == 3))
        monkeypatch.setattr(daemon_module, "RETRY_S", 60.0)  # the loop itself does not try again
        daemon.run()
    assert "could not be written" in reasons[0]
    assert reasons[1] == ""


def test_a_failure_is_logged_once_and_again_when_its_message_changes() -> None:
    """A full disk is not filled further by its own log; after the limit the failure ends the run."""
    now = [0.0]
    degradation = Degradation(100.0, lambda: now[0])
    with capture_logs() as logs:
        for second in range(99):
            now[0] = float(second)
            degradation.failed("snapshot", SnapshotError("no room" if second < 50 else "no disk"))
    assert [(log["error"], log["gives_up_in_s"]) for log in logs] == [("no room", 100), ("no disk", 50)]
    now[0] = 100.0
    with pytest.raises(SnapshotError, match="no disk"):
        degradation.failed("snapshot", SnapshotError("no disk"))
    degradation.recovered("snapshot")
    assert degradation.reason == ""
    degradation.failed("snapshot", SnapshotError("no disk"))  # the limit applies to consecutive failures
