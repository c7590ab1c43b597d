"""Notifications to the service manager: readiness, status, watchdog, stop."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing

from streamlearn.daemon.process import STATUS_EVERY_S, ServiceManager, one_line
from streamlearn.events import Event
from streamlearn.status import PartitionStatus, Phase, SnapshotStatus, Status
from streamlearn.stream.record import TopicPartition

LOADING = Status(Phase.STARTING, reason="the backbone is being loaded")
RUNNING = Status(Phase.RUNNING, ready=True, step=3, records_trained=24, tokens_per_s=811.6)


class Manager:
    """The service manager's socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        """Lines since the last call."""
        lines = []
        while True:
            try:
                lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@streamlearn-test-{os.getpid()}"


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    other = Manager("\0" + address[1:] if address.startswith("@") else address)
    yield other
    other.close()


class Time:
    """A clock that stands still unless moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ready_is_sent_once_and_not_while_loading(address: str, manager: Manager) -> None:
    time = Time()
    ours = ServiceManager(address, clock=time)
    ours.on_publish(LOADING)
    assert manager.received() == ["STATUS=starting: the backbone is being loaded"]
    ours.on_publish(RUNNING)
    assert manager.received() == ["READY=1", f"STATUS={one_line(RUNNING)}"]
    time.now += 60
    ours.on_publish(RUNNING)
    assert manager.received() == []
    ours.on_publish(replace(RUNNING, phase=Phase.STOPPING, ready=False, reason="the daemon is stopping"))
    assert manager.received() == ["STOPPING=1", "STATUS=stopping: the daemon is stopping"]


def test_a_status_line_is_not_sent_for_every_step(address: str, manager: Manager) -> None:
    time = Time()
    ours = ServiceManager(address, clock=time)
    for step in range(128):
        ours.on_publish(replace(RUNNING, step=step))
        time.now += STATUS_EVERY_S / 64
    assert [line.split(",")[0] for line in manager.received()] == [
        "READY=1",
        "STATUS=running: step 0",
        "STATUS=running: step 64",
    ]


def test_only_a_running_loop_serves_the_watchdog(address: str, manager: Manager) -> None:
    """Four times per interval while the loop publishes."""
    time = Time()
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    ours = ServiceManager.from_environment(environ)
    ours._clock = time
    served = []
    for _ in range(64):
        ours.on_publish(RUNNING)
        served.append("WATCHDOG=1" in manager.received())
        time.now += 0.125
    assert [i for i, each in enumerate(served) if each] == [0, 16, 32, 48]


@pytest.mark.parametrize("changes", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "soon"}])
def test_the_watchdog_of_another_process_is_not_served(address: str, manager: Manager, changes: dict[str, str]) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid()), **changes}
    ServiceManager.from_environment(environ).on_publish(RUNNING)
    assert "WATCHDOG=1" not in manager.received()


def test_a_rank_serves_the_watchdog_of_torchrun(address: str, manager: Manager) -> None:
    """Which is its parent, and the main process of the unit."""
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getppid())}
    ServiceManager.from_environment(environ).on_publish(RUNNING)
    assert "WATCHDOG=1" not in manager.received()
    ServiceManager.from_environment({**environ, "TORCHELASTIC_RUN_ID": "none"}).on_publish(RUNNING)
    assert "WATCHDOG=1" in manager.received()


def test_an_unreachable_manager_stops_nothing(tmp_path: Path) -> None:
    """It is logged; without an address nothing is sent or logged."""
    with structlog.testing.capture_logs() as events:
        ServiceManager(str(tmp_path / "absent")).on_publish(RUNNING)
    assert [event["event"] for event in events] == [Event.SERVICE_MANAGER_UNREACHABLE]
    with structlog.testing.capture_logs() as events:
        ServiceManager.from_environment({}).on_publish(RUNNING)
    assert events == []


def test_the_status_line_sums_up_the_status() -> None:
    """Lag is the sum over all partitions, and unknown while one of them is."""
    partitions = tuple(PartitionStatus(TopicPartition("t", i), 5, lag) for i, lag in enumerate((3, 4)))
    status = replace(
        RUNNING, partitions=partitions, snapshot=SnapshotStatus("00000002", 2, 0.0), dead_letters={"empty": 2}
    )
    assert one_line(status) == (
        "running: step 3, 24 records, 812 tokens/s, lag 7, 0 regimes, snapshot 00000002, 2 dead letters"
    )
    unknown = replace(status, partitions=(partitions[0], replace(partitions[1], lag=None)))
    assert "lag unknown" in one_line(unknown)
    assert one_line(Status(Phase.FAILED, reason="two\nlines")) == "failed: two lines"
