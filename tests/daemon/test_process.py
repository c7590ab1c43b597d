"""The daemon as a process: stop signals, notifications to systemd, and freed memory."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import structlog.testing
import torch

from benchmarks.measuring import resident_mib
from streamlearn.daemon.process import (
    STATUS_EVERY_S,
    STOPPING,
    ServiceManager,
    StopEarly,
    StopSignals,
    one_line,
    return_freed_memory,
)
from streamlearn.events import Event
from streamlearn.status import PartitionStatus, Phase, SnapshotStatus, Status
from tests.doubles import SetClock, tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon
from tests.variants import variants

START_S = 120.0
NAMES = [number.name for number in STOPPING]


@pytest.mark.parametrize("number", STOPPING, ids=NAMES)
def test_a_signal_is_no_error_before_the_loop_and_its_name_reaches_the_loop(number: signal.Signals) -> None:
    """No handler of Exception may take it for a failure; a second one interrupts nothing, and handlers are restored.

    A closed terminal may send two: one from the shell, one from the kernel.
    """
    signals, received, before = StopSignals(), list[str](), signal.getsignal(number)
    with signals.installed():
        signals.raise_on_signal()
        with pytest.raises(StopEarly, match=number.name):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is (signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    assert signal.getsignal(number) is before
    assert not issubclass(StopEarly, Exception)
    signals = StopSignals()
    with signals.installed():
        signals.raise_on_signal()
        signals.call_on_signal(received.append)
        os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)
    assert received == [number.name]


def test_an_ignored_hangup_stays_ignored() -> None:
    """As nohup(1) expects."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals, received = StopSignals(), list[str]()
        with signals.installed():
            signals.call_on_signal(received.append)
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_finaliser_swallowed_stops_the_loop() -> None:
    """While components are opened, Python drops what is raised in `__del__`; the loop is stopped at once."""
    signals = StopSignals()
    received: list[str] = []

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with signals.installed():
        signals.raise_on_signal()
        Finalised()
        signals.call_on_signal(received.append)
    assert received == ["SIGTERM"]


def test_while_modules_are_imported_a_signal_ends_the_process_cleanly() -> None:
    """`run` installs its handlers before it imports what takes seconds."""
    script = (
        "import os, sys, importlib.abc\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'streamlearn.cli.run': os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv = ['streamlearn', 'run', '--config', 'packaged:quickstart']\n"
        "from streamlearn.cli.main import main; main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=START_S)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture
def daemon(tmp_path: Path, backbone: Path) -> Iterator[DaemonProcess]:
    """A daemon on an endless file, which writes to its log at every step."""
    stream = tmp_path / "stream.jsonl"
    stream.write_bytes(b"".join(b'{"prompt": "say %d", "completion": " %d"}\n' % (i, i) for i in range(48)))
    daemon = ForkedDaemon(
        tmp_path / "run",
        {
            "source": {"jsonl": {"path": str(stream), "follow": True}},
            "stream": {"max_tokens": 32, "batch_tokens": 128, "batch_records": 4},
            "backbone": {"model": str(backbone), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "serve": {"port": 0},
            "log": {"level": "debug"},
        },
    )
    yield daemon
    daemon.end()


@pytest.mark.parametrize("number", variants(dict(zip(NAMES, STOPPING, strict=True)), short=["SIGTERM"]))
def test_each_signal_ends_a_learning_daemon_with_a_snapshot(daemon: DaemonProcess, number: signal.Signals) -> None:
    """Exit 0, and the snapshot covers the last journalled step."""
    daemon.start()
    daemon.wait_until(lambda: daemon.journalled_step() >= 2, "two steps")
    os.kill(daemon.pid, number)
    assert daemon.wait_for_end(START_S) == 0
    assert daemon.newest().manifest["step"] == daemon.journalled_step() >= 2
    stops = [orjson.loads(line) for line in daemon.log.read_bytes().splitlines()]
    assert stops[-1]["event"] == "daemon_stopped"


IN_A_TERMINAL = """
import os, pathlib, pty, sys
journal, *command = sys.argv[1:]
process, terminal = pty.fork()
if process == 0:
    os.execv(command[0], command)
while not pathlib.Path(journal).exists() or pathlib.Path(journal).read_bytes().count(b"\\n") < 2:
    os.read(terminal, 1 << 16)  # or the terminal's buffer would fill up; fails if the daemon ends early
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
"""A process of its own, since a fork in a process with threads may deadlock."""


def test_a_closed_terminal_ends_a_learning_daemon_with_a_snapshot(daemon: DaemonProcess) -> None:
    """The kernel sends SIGHUP, and from then on every write to the terminal fails."""
    run = [sys.executable, "-m", "streamlearn", "run", "--config", str(daemon.config)]
    journal = str(daemon.state / "journal.jsonl")
    ended = subprocess.run([sys.executable, "-c", IN_A_TERMINAL, journal, *run], check=False, timeout=START_S)
    assert ended.returncode == 0
    assert daemon.newest().manifest["step"] == daemon.journalled_step() >= 2


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
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    other = Manager(str(tmp_path / "notify"))
    yield other
    other.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


def test_an_abstract_address_is_understood() -> None:
    name = f"streamlearn-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    ServiceManager(f"@{name}").on_publish(RUNNING)
    assert "READY=1" in manager.received()
    manager.close()


def test_ready_is_sent_once_and_not_while_loading(address: str, manager: Manager) -> None:
    time = SetClock()
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
    time = SetClock()
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
    time = SetClock()
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    ours = ServiceManager.from_environment(environ)
    ours._clock = time
    served = []
    for _ in range(64):
        ours.on_publish(RUNNING)
        served.append("WATCHDOG=1" in manager.received())
        time.now += 0.125
    assert [turn for turn, is_served in enumerate(served) if is_served] == [0, 16, 32, 48]


def test_only_the_main_process_of_the_unit_serves_the_watchdog(address: str, manager: Manager) -> None:
    """Of a rank, which torchrun started, that is its parent."""
    ours = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    of_parent = {**ours, "WATCHDOG_PID": str(os.getppid())}
    for environ, is_served in (
        (ours, True),
        ({**ours, "WATCHDOG_PID": "1"}, False),
        ({**ours, "WATCHDOG_USEC": ""}, False),
        ({**ours, "WATCHDOG_USEC": "soon"}, False),
        (of_parent, False),
        ({**of_parent, "TORCHELASTIC_RUN_ID": "none"}, True),
    ):
        ServiceManager.from_environment(environ).on_publish(RUNNING)
        assert ("WATCHDOG=1" in manager.received()) == is_served, environ


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
    partitions = tuple(PartitionStatus("t", i, 5, lag) for i, lag in enumerate((3, 4)))
    status = replace(
        RUNNING, partitions=partitions, snapshot=SnapshotStatus("00000002", 2, 0.0), dead_letters={"empty": 2}
    )
    assert one_line(status) == (
        "running: step 3, 24 records, 812 tokens/s, lag 7, 0 regimes, snapshot 00000002, 2 dead letters"
    )
    unknown = replace(status, partitions=(partitions[0], replace(partitions[1], lag=None)))
    assert "lag unknown" in one_line(unknown)
    assert one_line(Status(Phase.FAILED, reason="two\nlines")) == "failed: two lines"


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_what_lies_between_tensors_in_use_is_returned() -> None:
    """Every other one of many small tensors is freed: without the call their memory stays resident."""
    tensors = [torch.ones(16_384) for _ in range(8000)]  # 500 MB
    kept = tensors[::2]
    full = resident_mib()
    del tensors
    return_freed_memory()
    assert resident_mib() < full - 150
    assert all(bool((tensor == 1).all()) for tensor in kept[:10])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_tensors_are_returned_one_by_one() -> None:
    """In a process of its own, since it cannot be undone."""
    program = """
import torch
from benchmarks.measuring import resident_mib
from streamlearn.daemon.process import return_freed_tensors
return_freed_tensors()
tensors = [torch.ones(1 << 19) for _ in range(200)]  # 400 MB, each of which glibc would take from its heap
kept = tensors[::2]
full = resident_mib()
del tensors
print(full - resident_mib())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(done.stdout) > 150
