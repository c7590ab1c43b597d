"""What a service manager hears, and from whom."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing

from streamlearn.events import Event
from streamlearn.runtime.systemd import STATUS_EVERY_S, ServiceManager, one_line
from streamlearn.status.status import PartitionStatus, Phase, SnapshotStatus, Status
from streamlearn.stream.record import TopicPartition

LOADING = Status(Phase.STARTING, reason="the backbone is being loaded")
RUNNING = Status(Phase.RUNNING, ready=True, step=3, records_trained=24, tokens_per_s=811.6)


class Manager:
    """The other end."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Lines since the last call."""
        lines = []
        while True:
            try:
                lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return lines

    def close(self) -> None:
        """Go away."""
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
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ready_is_said_once_and_not_while_loading(address: str, manager: Manager) -> None:
    time = Time()
    ours = ServiceManager(address, clock=time)
    ours.on_publish(LOADING)
    assert manager.heard() == ["STATUS=starting: the backbone is being loaded"]
    ours.on_publish(RUNNING)
    assert manager.heard() == ["READY=1", f"STATUS={one_line(RUNNING)}"]
    time.now += 60
    ours.on_publish(RUNNING)
    assert manager.heard() == []
    ours.on_publish(replace(RUNNING, phase=Phase.STOPPING, ready=False, reason="the daemon is stopping"))
    assert manager.heard() == ["STOPPING=1", "STATUS=stopping: the daemon is stopping"]


def test_a_status_line_is_not_sent_for_every_step(address: str, manager: Manager) -> None:
    time = Time()
    ours = ServiceManager(address, clock=time)
    for step in range(128):
        ours.on_publish(replace(RUNNING, step=step))
        time.now += STATUS_EVERY_S / 64
    assert [line.split(",")[0] for line in manager.heard()] == [
        "READY=1",
        "STATUS=running: step 0",
        "STATUS=running: step 64",
    ]


def test_the_watchdog_is_fed_by_the_loop_alone(address: str, manager: Manager) -> None:
    """Four times an interval while the loop turns, and never while it does not."""
    time = Time()
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    ours = ServiceManager.from_environment(environ)
    ours._clock = time
    fed = []
    for _ in range(64):
        ours.on_publish(RUNNING)
        fed.append("WATCHDOG=1" in manager.heard())
        time.now += 0.125
    assert [i for i, each in enumerate(fed) if each] == [0, 16, 32, 48]


@pytest.mark.parametrize("changes", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "soon"}])
def test_another_process_s_watchdog_is_left_alone(address: str, manager: Manager, changes: dict[str, str]) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid()), **changes}
    ServiceManager.from_environment(environ).on_publish(RUNNING)
    assert "WATCHDOG=1" not in manager.heard()


def test_a_manager_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    """It is said in the log; without an address nothing is said at all."""
    with structlog.testing.capture_logs() as events:
        ServiceManager(str(tmp_path / "nobody")).on_publish(RUNNING)
    assert [event["event"] for event in events] == [Event.SERVICE_MANAGER_UNREACHABLE]
    with structlog.testing.capture_logs() as events:
        ServiceManager.from_environment({}).on_publish(RUNNING)
    assert events == []


def test_the_line_says_how_it_goes() -> None:
    """Lag is that of all partitions together, and unknown while one of them is."""
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
