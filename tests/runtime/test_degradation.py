"""A disk, and a dead-letter sink, that refuse for a while: learning goes on, nothing is lost, and not for ever."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import streamlearn.runtime.daemon as daemon_module
from connectors.dead_letters import FileDeadLetters
from streamlearn.errors import DeadLetterError, SnapshotError
from streamlearn.events import Event
from streamlearn.runtime.degradation import Degradation
from streamlearn.settings import Settings
from streamlearn.snapshot.files import Files
from streamlearn.status.status import Status
from streamlearn.stream.batch import Batch
from tests.runtime.test_daemon import RUBBISH, assert_same, backbone, daemon_of, make, opened, records, run

__all__ = ["backbone", "make"]


class Disk:
    """Says at every step whether it works, and refuses all that is to be durable while it does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: Callable[[int], bool]) -> None:
        self._broken_at = broken
        self.broken = False
        self.seen: list[str] = []
        self._write, self._fsync, self._files = os.write, os.fsync, Files.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(Files, "write", self.write_file)
        monkeypatch.setattr(daemon_module, "RETRY_S", 0.0)

    def check(self) -> None:
        """Fail when it is broken."""
        if self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, descriptor: int, data: Any) -> int:
        """The journal's and the dead letters' system call."""
        self.check()
        return self._write(descriptor, data)

    def write_file(self, path: Path, data: bytes) -> None:
        """A file of a snapshot's."""
        self.check()
        self._files(Files(), path, data)

    def on_start(self, status: Status) -> None:
        """The first snapshot is written."""

    def on_step(self, batch: Batch, step: Any, status: Status) -> None:
        """From the next step on."""
        self.seen.append(status.degraded)
        self.broken = self._broken_at(step.number)

    def on_shift(self, entry: Any) -> None:
        """Nothing."""

    def on_snapshot(self, info: Any) -> None:
        """Nothing."""


def lines() -> list[bytes]:
    found = records(48)
    for place in (9, 25, 40):
        found.insert(place, RUBBISH)
    return found


def test_learning_outlasts_a_full_disk(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """The status says what is refused; the end is as if nothing had been, and letters stand once."""
    wanted, _ = run(make(lines(), "whole"))
    settings = make(lines(), "refused")
    with monkeypatch.context() as patch, capture_logs() as logs:
        disk = Disk(patch, broken=lambda step: 2 <= step < 9)
        found, daemon = run(settings, disk)
    assert_same(found, wanted)
    assert daemon.state.ledger.rows() == [("stream.jsonl", 0, 48, 3, 0)]
    assert disk.seen[1] == ""
    assert all("No space left" in said for said in disk.seen[3:9])
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


def test_a_disk_that_stays_full_ends_the_run(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the bound the daemon stops with the disk's error; a restart, given room, loses and repeats nothing."""
    wanted, _ = run(make(lines(), "whole"))
    settings = make(lines(), "ended")
    with monkeypatch.context() as patch, opened(settings) as components:
        daemon = daemon_of(components, Disk(patch, broken=lambda step: step >= 5))
        daemon.degradation = Degradation(0.0)
        with pytest.raises((SnapshotError, DeadLetterError), match="No space left"):
            daemon.run()
    found, daemon = run(settings)
    assert_same(found, wanted)
    assert daemon.state.ledger.rows() == [("stream.jsonl", 0, 48, 3, 0)]
    letters = (settings.state / "dead_letters.jsonl").read_bytes().splitlines()
    assert len(letters) == 3


def test_trouble_is_told_once_and_again_when_it_changes() -> None:
    """The log does not fill up the disk that is full."""
    now = [0.0]
    degradation = Degradation(100.0, lambda: now[0])
    with capture_logs() as logs:
        for second in range(99):
            now[0] = float(second)
            degradation.met("snapshot", SnapshotError("no room" if second < 50 else "no disk"))
    assert [(log["error"], log["gives_up_in_s"]) for log in logs] == [("no room", 100), ("no disk", 50)]
    now[0] = 100.0
    with pytest.raises(SnapshotError, match="no disk"):
        degradation.met("snapshot", SnapshotError("no disk"))


def test_what_worked_in_between_starts_anew() -> None:
    """The bound is of one stretch of failures."""
    now = [0.0]
    degradation = Degradation(10.0, lambda: now[0])
    for second in range(0, 50, 9):
        now[0] = float(second)
        degradation.met("snapshot", SnapshotError("no room"))
        degradation.over("snapshot")
    assert degradation.reason == ""
