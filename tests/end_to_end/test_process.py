"""A daemon as a process: health probes, internal errors, and a second daemon."""

import socket
from pathlib import Path
from typing import NoReturn

import httpx2
import orjson
import pytest
import yaml

from streamlearn.errors import ConfigError, StateLockedError
from streamlearn.learner.learner import Learner
from streamlearn.snapshot.files import StateLock
from tests.doubles import tiny_backbone
from tests.end_to_end.process import STOP_S, DaemonProcess, ForkedDaemon
from tests.forked import ForkedProcess, run_command


@pytest.mark.parametrize("enabled", [True, False])
def test_health_is_served_whether_or_not_the_main_endpoint_is(
    enabled: bool, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """The log has both ports; without the main endpoint no token is created."""
    stream = tmp_path / "stream.jsonl"
    stream.write_bytes(b'{"text": "hello world"}\n' * 4)
    config = {
        "source": {"jsonl": {"path": str(stream), "follow": True}},
        "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "serve": {"enabled": enabled, "port": 0, "health_port": 0, "health_host": "127.0.0.1"},
        "log": {"style": "json"},
    }
    daemon = ForkedDaemon(tmp_path / "daemon", config)
    daemons.append(daemon)
    daemon.start()

    def started() -> dict[bool, str]:
        events = [orjson.loads(line) for line in daemon.log.read_bytes().splitlines() if line.startswith(b"{")]
        starts = [event for event in events if event["event"] == "http_started"]
        return {event.get("health", False): f"http://127.0.0.1:{event['port']}" for event in starts}

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
    (tmp_path / "stream.jsonl").write_bytes(b'{"text": "hello world"}\n')
    config = {
        "state": str(tmp_path / "state"),
        "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl")}},
        "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "serve": {"port": 0},
        "log": {"style": "json"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    log = tmp_path / "log.jsonl"
    daemon = ForkedProcess(run_broken, ["run", "--config", str(tmp_path / "config.yaml")], stderr=log)
    assert daemon.wait(STOP_S) == 1
    events = [orjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    failed = [event for event in events if event["event"] == "daemon_failed"]
    assert [(event["error"], event["exit_code"]) for event in failed] == [("ValueError", 1)]
    assert b"nobody expected this" in log.read_bytes()
    assert (tmp_path / "state" / "in_progress").read_bytes().strip(b"\0\n"), "the batch is still in progress"


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
