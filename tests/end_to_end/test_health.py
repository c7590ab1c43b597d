"""Health probes of a daemon as a process."""

from pathlib import Path

import httpx2
import orjson
import pytest

from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon


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
