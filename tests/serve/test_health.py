"""The health listener: liveness and readiness for probes, on any address and for any Host, and nothing else."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from streamlearn.board import Board
from streamlearn.daemon.process import one_line, thread_failures_to
from streamlearn.errors import ConfigError
from streamlearn.http.server import HttpServer, Listener
from streamlearn.jobs.queue import JobQueue
from streamlearn.serve.app import health_app
from streamlearn.serve.metrics import registry
from streamlearn.settings import ServeSettings

from .doubles import RUNNING, Time

HEALTH = Listener.for_health(ServeSettings(port=0, health_port=0))


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def board(time: Time) -> Board:
    return Board(RUNNING, time.clock())


@pytest.fixture
def server(board: Board) -> Iterator[HttpServer]:
    with HttpServer(health_app(board), HEALTH) as server:
        yield server


@pytest.fixture
def probe(server: HttpServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=5.0) as client:
        yield client


def test_probes_get_the_responses_of_the_main_endpoint_and_nothing_else(
    probe: httpx2.Client, client: httpx2.Client
) -> None:
    """For any Host and Origin: there is nothing that another site could not know."""
    for path in ("/livez", "/readyz"):
        assert probe.get(path).json() == client.get(path).json()
        assert set(probe.get(path).headers) == set(client.get(path).headers)
        for headers in ({"host": "10.1.2.3:8086"}, {"origin": "https://evil.example"}):
            assert probe.get(path, headers=headers).status_code == 200
    answer = probe.get("/v1/status")
    assert answer.status_code == probe.head("/openapi.json").status_code == 404
    assert answer.json()["error"]["hint"] == "this port serves only GET /livez and GET /readyz"


def test_a_thread_that_an_error_ended_is_shown_everywhere(
    board: Board, probe: httpx2.Client, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For good: in /livez, the metrics, the status and the line for systemd. The loop still accepts jobs."""
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # pytest's would fail the test
    with thread_failures_to(board.thread_ended):
        thread = threading.Thread(target=lambda: threading.Event().wait(float("inf")), name="publish")
        thread.start()
        thread.join()
    board.publish(replace(RUNNING, step=RUNNING.step + 1))
    refused = probe.get("/livez")
    assert refused.status_code == 503
    assert "the thread publish ended by OverflowError: " in refused.json()["error"]["message"]
    assert probe.get("/readyz").status_code == 200
    assert "DEGRADED: the thread publish ended" in one_line(board.read())
    assert registry(board, JobQueue(1), time.clock()).get_sample_value("streamlearn_degraded") == 1.0
    assert board.read().faults.startswith("the thread publish ended")


def test_a_port_in_use_names_the_setting_to_change(board: Board, server: HttpServer) -> None:
    taken = Listener.for_health(ServeSettings(health_port=server.port))
    with pytest.raises(ConfigError, match=rf"0\.0\.0\.0:{server.port} cannot be bound: .* or set serve.health_port"):
        HttpServer(health_app(board), taken).start()
