"""A daemon as a process: health probes, internal errors, and a second daemon."""

import socket
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import pytest

from streamlearn.errors import ConfigError, StateLockedError
from streamlearn.learner.learner import Learner
from streamlearn.snapshot.files import StateLock
from tests.doubles import tiny_backbone
from tests.end_to_end.process import STOP_S, DaemonProcess, ForkedDaemon
from tests.forked import ForkedProcess, run_command


def small_daemon(folder: Path, *, follow: bool = False, serve: dict[str, Any]) -> DaemonProcess:
    """A daemon over four records."""
    stream = folder / "stream.jsonl"
    stream.write_bytes(b'{"text": "hello world"}\n' * 4)
    return ForkedDaemon(
        folder / "daemon",
        {
            "source": {"jsonl": {"path": str(stream), "follow": follow}},
            "backbone": {"model": str(tiny_backbone(folder / "backbone")), "dtype": "float32"},
            "adapter": {"num_heads": 4},
            "serve": serve,
            "log": {"style": "json"},
        },
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_health_is_served_whether_or_not_the_main_endpoint_is(
    enabled: bool, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """The log has both ports; without the main endpoint no token is created."""
    daemon = small_daemon(
        tmp_path, follow=True, serve={"enabled": enabled, "port": 0, "health_port": 0, "health_host": "127.0.0.1"}
    )
    daemons.append(daemon)
    daemon.start()

    def started() -> dict[bool, str]:
        starts = daemon.events("http_started")
        return {start.get("health", False): f"http://127.0.0.1:{start['port']}" for start in starts}

    daemon.wait_until(lambda: len(started()) == 1 + enabled, "the listeners are up")
    health = started()[True]
    daemon.wait_until(lambda: httpx2.get(f"{health}/readyz").status_code == 200, "the daemon is ready")
    assert httpx2.get(f"{health}/livez", headers={"host": "pod.internal"}).json()["alive"] is True
    assert httpx2.get(f"{health}/v1/status").status_code == 404
    if enabled:
        assert httpx2.get(f"{started()[False]}/v1/status").json()["ready"] is True
    assert (daemon.state / "http.token").exists() == enabled
    assert daemon.terminate() == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{health}/livez")


def run_broken(arguments: list[str]) -> None:
    """`streamlearn ARGUMENTS`, with a step that fails."""

    def step(*_: object, **__: object) -> NoReturn:
        raise ValueError("nobody expected this")

    Learner.step = step  # type: ignore[method-assign]
    run_command(arguments)


def test_an_internal_error_exits_1_with_an_event(tmp_path: Path) -> None:
    """The unit restarts after it, and the crash guard counts it."""
    daemon = small_daemon(tmp_path, serve={"port": 0})
    process = ForkedProcess(run_broken, ["run", "--config", str(daemon.config)], stderr=daemon.log)
    assert process.wait(STOP_S) == 1
    assert [(event["error"], event["exit_code"]) for event in daemon.events("daemon_failed")] == [("ValueError", 1)]
    assert "nobody expected this" in daemon.log.read_text()
    assert (daemon.state / "in_progress").read_bytes().strip(b"\0\n"), "the batch is still in progress"


def test_the_exit_code_says_whether_to_stop_the_other_daemon_or_to_correct_the_port(
    tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """With one configuration for both, state folder and port are taken; the unit restarts after 75 and not after 78."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = small_daemon(tmp_path, serve={"port": taken.getsockname()[1]})
        daemons.append(daemon)
        with StateLock(daemon.state):
            daemon.start()
            assert daemon.wait_for_end(STOP_S) == StateLockedError.exit_code
        assert "locked by process" in daemon.log.read_text()
        daemon.start()
        assert daemon.wait_for_end(STOP_S) == ConfigError.exit_code
