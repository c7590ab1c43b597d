"""SIGTERM, SIGINT and SIGHUP before, while and after components are opened; on real processes where it matters."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from streamlearn.daemon.process import STOPPING, StopEarly, StopSignals
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess
from tests.variants import variants

START_S = 120.0
NAMES = [number.name for number in STOPPING]


def test_the_stopping_signals_are_these() -> None:
    """SIGHUP comes from a closed terminal."""
    assert set(STOPPING) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@pytest.mark.parametrize("number", STOPPING, ids=NAMES)
def test_while_components_are_opened_a_signal_is_no_error(number: signal.Signals) -> None:
    """No handler of Exception on the way may take it for a failure; the handlers are restored afterwards."""
    signals = StopSignals()
    before = signal.getsignal(number)
    with signals.installed():
        signals.raise_on_signal()
        with pytest.raises(StopEarly, match=number.name):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is (signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    assert signal.getsignal(number) is before
    assert not issubclass(StopEarly, Exception)


@pytest.mark.parametrize("number", STOPPING, ids=NAMES)
def test_the_loop_receives_the_name_of_the_signal(number: signal.Signals) -> None:
    signals, received = StopSignals(), list[str]()
    with signals.installed():
        signals.raise_on_signal()
        signals.call_on_signal(received.append)
        os.kill(os.getpid(), number)
    assert received == [number.name]


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


def test_a_second_hangup_does_not_interrupt_the_snapshot() -> None:
    """A closed terminal may send two: one from the shell, one from the kernel."""
    signals, received = StopSignals(), list[str]()
    with signals.installed():
        signals.call_on_signal(received.append)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    assert received == ["SIGHUP"]


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


@pytest.mark.parametrize("number", STOPPING, ids=NAMES)
def test_while_modules_are_imported_a_signal_ends_the_process_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    """`run` installs its handlers before it imports what takes seconds."""
    script = (
        "import os, sys, importlib.abc\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'streamlearn.cli.run': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.argv = ['streamlearn', 'run', '--config', {str(tmp_path / 'absent.yaml')!r}]\n"
        "from streamlearn.commands.cli import main; main()\n"
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
    daemon = DaemonProcess(
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
    assert daemon._process is not None
    daemon._process.send_signal(number)
    assert daemon._process.wait(timeout=START_S) == 0
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
