"""A second daemon as a process, beside one that has the state folder and the port."""

import socket
from pathlib import Path

import pytest

from streamlearn.errors import ConfigError, StateLockedError
from streamlearn.snapshot.lock import StateLock
from tests.doubles import tiny_backbone
from tests.end_to_end.process import STOP_S, DaemonProcess, ForkedDaemon


@pytest.mark.parametrize(("locked", "code"), [(True, StateLockedError.exit_code), (False, ConfigError.exit_code)])
def test_the_exit_code_says_whether_to_stop_the_other_daemon_or_to_correct_the_port(
    locked: bool, code: int, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """With one configuration for both, state folder and port are taken; the unit restarts after 75 and not after 78."""
    (tmp_path / "stream.jsonl").write_bytes(b'{"text": "hello world"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = {
            "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl")}},
            "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "serve": {"port": taken.getsockname()[1]},
        }
        daemon = ForkedDaemon(tmp_path / "daemon", config)
        daemons.append(daemon)
        lock = StateLock(daemon.state) if locked else None
        daemon.start()
        assert daemon.wait_for_end(STOP_S) == code
        if lock is not None:
            lock.release()
    assert ("locked by process" in daemon.log.read_text()) == locked
