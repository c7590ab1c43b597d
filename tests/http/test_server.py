import socket
import threading
import time
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from structlog.testing import capture_logs

from streamlearn.board import Board
from streamlearn.errors import ConfigError
from streamlearn.events import Event
from streamlearn.http.server import HttpServer, Listener
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.app import create_app
from streamlearn.serve.models import SnapshotRow
from streamlearn.settings import ServeSettings
from tests.serve.doubles import RUNNING, SETTINGS, TOKEN, Daemon, Time


def test_starts_and_stops_twice_without_leaving_a_thread(daemon: Daemon) -> None:
    """Even if a request used the event loop's worker threads, and with an idle connection open."""
    before = set(threading.enumerate())
    other = Daemon()
    with httpx2.Client(base_url=f"http://127.0.0.1:{other.server.port}") as idle:
        assert idle.get("/v1/snapshots").status_code == 200
        other.server.start()
        first_port = other.server.port
        other.server.stop()
        other.server.stop()
    other.server.start()
    assert other.server.port > 0
    assert httpx2.get(f"http://127.0.0.1:{other.server.port}/livez").status_code == 200
    other.stop()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first_port), timeout=1).close()


def test_a_port_in_use_is_reported_with_a_remedy(daemon: Daemon) -> None:
    settings = SETTINGS.model_copy(update={"port": daemon.server.port})
    app = create_app(daemon.board, daemon.jobs, settings, list, daemon.time.clock(), token=TOKEN, audit=daemon.audit)
    with pytest.raises(
        ConfigError,
        match=r"127.0.0.1:\d+ cannot be bound: Address already in use; stop what uses it .* or set serve.port",
    ):
        HttpServer(app, Listener.for_requests(settings)).start()


def test_a_request_that_waits_for_a_job_ends_when_the_daemon_stops() -> None:
    daemon = Daemon()
    daemon.loop.paused.set()
    answers: list[httpx2.Response] = []
    url = f"http://127.0.0.1:{daemon.server.port}/v1/eval"
    waiting = threading.Thread(target=lambda: answers.append(httpx2.post(url, json={"examples": [{"text": "a"}]})))
    waiting.start()
    while len(daemon.jobs) == 0:
        time.sleep(0.005)
    daemon.stop()
    waiting.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "stopping"


def test_an_exception_in_a_handler_is_logged_with_its_traceback_and_hidden_from_the_client(daemon: Daemon) -> None:
    def broken() -> list[SnapshotRow]:
        raise RuntimeError("a secret path")

    clock = Time().clock()
    app = create_app(Board(RUNNING, clock), JobQueue(1), SETTINGS, broken, clock, token=TOKEN, audit=daemon.audit)
    server = HttpServer(app, Listener.for_requests(SETTINGS))
    with capture_logs() as logs:
        server.start()
        url = f"http://127.0.0.1:{server.port}"
        answer = httpx2.get(f"{url}/v1/snapshots")
        assert httpx2.get(f"{url}/livez").status_code == 200
        server.stop()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    failed = [entry for entry in logs if entry["event"] == Event.HTTP_FAILED]
    assert len(failed) == 1
    assert failed[0]["exc_info"]


def test_more_connections_than_allowed_get_503(daemon: Daemon) -> None:
    """Open files of the process are for snapshots too."""
    app = create_app(daemon.board, daemon.jobs, SETTINGS, list, daemon.time.clock(), token=TOKEN, audit=daemon.audit)
    with HttpServer(app, Listener.for_requests(SETTINGS), max_connections=3) as server:
        url = f"http://127.0.0.1:{server.port}/livez"
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        time.sleep(0.1)
        assert httpx2.get(url).status_code == 503
        for connection in silent:
            connection.close()
        time.sleep(0.1)
        assert httpx2.get(url).status_code == 200


def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """Before the address is bound."""
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    settings = ServeSettings(port=0, tls_certfile=chain, tls_keyfile=key)
    with pytest.raises(ConfigError, match=r"tls_certfile .*chain\.pem and tls_keyfile .*: expected a PEM certificate"):
        HttpServer(Starlette(), Listener.for_requests(settings)).start()
