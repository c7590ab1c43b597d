import re
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from structlog.testing import capture_logs

from streamlearn.controls import AuditLog
from streamlearn.errors import ConfigError
from streamlearn.events import Event
from streamlearn.http.server import HttpServer
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.app import create_app
from streamlearn.serve.models import SnapshotRow
from streamlearn.settings import GatewaySettings
from streamlearn.status import Board
from tests.serve.doubles import RUNNING, SETTINGS, TOKEN, Daemon, Time


def test_starts_and_stops_twice_without_leaving_a_thread(daemon: Daemon) -> None:
    """Even if a request used the event loop's worker threads, and with an idle connection open."""
    before = set(threading.enumerate())
    other = Daemon()
    with httpx.Client(base_url=f"http://127.0.0.1:{other.server.port}") as idle:
        assert idle.get("/v1/snapshots").status_code == 200
        other.server.start()
        first_port = other.server.port
        other.server.stop()
        other.server.stop()
    other.server.start()
    assert other.server.port > 0
    assert httpx.get(f"http://127.0.0.1:{other.server.port}/livez").status_code == 200
    other.stop()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first_port), timeout=1).close()


def test_the_start_is_logged_with_the_bound_port() -> None:
    with capture_logs() as logs:
        daemon = Daemon()
        daemon.stop()
    started = [entry for entry in logs if entry["event"] == Event.HTTP_STARTED]
    assert [(entry["host"], entry["port"]) for entry in started] == [("127.0.0.1", daemon.server.port)]


def test_a_port_in_use_is_reported_with_a_remedy(daemon: Daemon) -> None:
    settings = SETTINGS.model_copy(update={"port": daemon.server.port})
    app = create_app(daemon.board, daemon.jobs, settings, list, daemon.time.clock(), token=TOKEN, audit=daemon.audit)
    with pytest.raises(
        ConfigError,
        match=r"127.0.0.1:\d+ cannot be bound: Address already in use; stop what uses it .* or set serve.port",
    ):
        HttpServer(app, settings).start()


def test_a_host_that_cannot_be_resolved_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the resolver, and with what sets the host: here the gateway's option."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", fail)
    settings = GatewaySettings(published=Path("published"), upstreams=("http://localhost:1",), port=0).model_copy(
        update={"host": "nowhere.invalid"}
    )
    expected = "nowhere.invalid:0 cannot be bound: Name or service not known; set --host and --port, or choose another"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        HttpServer(Starlette(), settings).start()


def test_a_request_that_waits_for_a_job_ends_when_the_daemon_stops() -> None:
    daemon = Daemon()
    daemon.loop.paused.set()
    answers: list[httpx.Response] = []
    url = f"http://127.0.0.1:{daemon.server.port}/v1/generate"
    waiting = threading.Thread(target=lambda: answers.append(httpx.post(url, json={"prompt": "a"})))
    waiting.start()
    while len(daemon.jobs) == 0:
        time.sleep(0.005)
    daemon.stop()
    waiting.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "stopping"


def test_an_exception_in_a_handler_is_logged_with_its_traceback_and_hidden_from_the_client(tmp_path: Path) -> None:
    def broken() -> list[SnapshotRow]:
        raise RuntimeError("a secret path")

    clock = Time().clock()
    app = create_app(Board(RUNNING, clock), JobQueue(1), SETTINGS, broken, clock, token=TOKEN, audit=AuditLog(tmp_path))
    server = HttpServer(app, SETTINGS)
    with capture_logs() as logs:
        server.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
            answer = client.get("/v1/snapshots")
            assert client.get("/livez").status_code == 200
        server.stop()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    failed = [entry for entry in logs if entry["event"] == Event.HTTP_FAILED]
    assert len(failed) == 1
    assert failed[0]["exc_info"]


def test_a_request_that_is_not_http_ends_only_its_connection(daemon: Daemon, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", daemon.server.port)) as connection:
        connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert b" 400 " in connection.recv(100)
    assert client.get("/livez").status_code == 200
