"""The health listener: liveness and readiness for probes, on any address and for any Host, and nothing else."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from streamlearn.errors import ConfigError
from streamlearn.events import Event
from streamlearn.http import server as module
from streamlearn.http.server import HttpServer
from streamlearn.serve.health import health_app
from streamlearn.settings import ServeSettings
from streamlearn.status import Board, Phase, Status

from .doubles import RUNNING, SETTINGS, Daemon, Time

HEALTH = ServeSettings(port=0, health_port=0)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def board(time: Time) -> Board:
    return Board(RUNNING, time.clock())


@pytest.fixture
def server(board: Board) -> Iterator[HttpServer]:
    with HttpServer(health_app(board), HEALTH, health=True) as server:
        yield server


@pytest.fixture
def probe(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=5.0) as client:
        yield client


def own_address() -> str:
    """An address of this machine other than loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chosen:
        try:
            chosen.connect(("192.0.2.1", 9))  # sends nothing: it only selects the interface
        except OSError:
            return "127.0.0.2"
        return str(chosen.getsockname()[0])


def test_health_is_served_on_the_address_of_the_machine(server: HttpServer) -> None:
    for address in ("127.0.0.1", own_address()):
        assert httpx.get(f"http://{address}:{server.port}/livez").json()["alive"] is True
        assert httpx.get(f"http://{address}:{server.port}/readyz").json()["ready"] is True


@pytest.mark.parametrize("host", ["10.1.2.3:8086", "evil.example", "pod.internal", "", "a@b"])
def test_every_host_is_accepted(probe: httpx.Client, host: str) -> None:
    """And every Origin: there is nothing that another site could not know."""
    for path in ("/livez", "/readyz"):
        assert probe.get(path, headers={"host": host}).status_code == 200
        assert probe.get(path, headers={"origin": "https://evil.example"}).status_code == 200


def test_a_request_of_http_1_0_without_a_host_is_served(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100)


def test_responses_equal_those_of_the_main_endpoint(probe: httpx.Client, client: httpx.Client) -> None:
    for path in ("/livez", "/readyz"):
        assert probe.get(path).json() == client.get(path).json()
        assert set(probe.get(path).headers) == set(client.get(path).headers)


@pytest.mark.parametrize(
    ("path", "code"),
    [("/v1/status", 404), ("/metrics", 404), ("/", 404), ("/openapi.json", 404), ("/docs", 404), ("/livez/", 404)],
)
def test_nothing_else_is_served(probe: httpx.Client, path: str, code: int) -> None:
    answer = probe.get(path)
    assert answer.status_code == code
    assert answer.json()["error"]["hint"] == "this port serves only GET /livez and GET /readyz"
    assert probe.head(path).status_code == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_not_allowed(probe: httpx.Client, method: str) -> None:
    answer = probe.request(method, "/livez")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_head_has_the_status_and_headers_of_get_and_no_body(probe: httpx.Client, path: str) -> None:
    get, head = probe.get(path), probe.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "date": ""} == {**get.headers, "date": ""}


def test_a_daemon_that_is_not_ready_is_503_with_the_reason(board: Board, probe: httpx.Client) -> None:
    board.publish(Status(Phase.RESTORING, reason="snapshot 40 is being read"))
    answer = probe.get("/readyz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["message"] == "snapshot 40 is being read"
    assert (probe.head("/readyz").status_code, probe.get("/livez").status_code) == (503, 200)


def test_a_loop_that_does_not_report_is_503_on_both_paths(time: Time, probe: httpx.Client) -> None:
    time.monotonic += 61
    assert [probe.get(path).status_code for path in ("/livez", "/readyz")] == [503, 503]
    assert probe.get("/livez").json()["error"]["code"] == "not_alive"


def test_query_and_body_are_ignored(probe: httpx.Client) -> None:
    assert probe.get("/livez?" + "a=b&" * 1000).status_code == 200
    assert probe.request("GET", "/livez", content=b"{" * 10_000).status_code == 200


def test_a_flood_of_silent_connections_does_not_block_a_probe(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of connections is bounded, and the one that has waited longest is closed."""
    monkeypatch.setattr(module.GuardedConnection, "max_connections", 4)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5.0)) for _ in range(32)
        ]
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{server.port}/livez", timeout=2.0).status_code == 200
        assert silent[0].recv(100) == b""


def test_a_request_must_arrive_within_the_deadline(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECEIVE_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as connection:
        connection.sendall(b"GET /livez HT")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_flood_of_one_listener_does_not_affect_the_other(
    server: HttpServer, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own connections."""
    monkeypatch.setattr(module.GuardedConnection, "max_connections", 4)
    main = http.client.HTTPConnection("127.0.0.1", daemon.server.port, timeout=5.0)
    main.connect()
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        main.request("GET", "/livez")
        assert main.getresponse().status == 200
    main.close()


def test_the_start_is_logged_as_health_with_the_bound_port(board: Board) -> None:
    with capture_logs() as logs, HttpServer(health_app(board), HEALTH, health=True) as server:
        assert server.port > 0
    [started] = [entry for entry in logs if entry["event"] == Event.HTTP_STARTED]
    assert (started["host"], started["port"], started["health"]) == ("0.0.0.0", server.port, True)  # noqa: S104


def test_a_port_in_use_names_the_setting_to_change(board: Board, server: HttpServer) -> None:
    taken = ServeSettings(health_port=server.port)
    with pytest.raises(ConfigError, match=rf"0\.0\.0\.0:{server.port} cannot be bound: .* or set serve.health_port"):
        HttpServer(health_app(board), taken, health=True).start()


def test_the_health_listener_is_off_by_default() -> None:
    assert SETTINGS.health_port is None


@pytest.mark.parametrize("serve", [{"port": 8083, "health_port": 8083}, {"health_port": 65536}, {"health_port": -1}])
def test_an_unusable_health_port_is_refused(serve: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="health_port"):
        ServeSettings.model_validate(serve)


@pytest.mark.parametrize(
    "serve", [{"port": 0, "health_port": 0}, {"port": 8083, "health_port": 8083, "enabled": False}]
)
def test_ports_that_do_not_collide_are_accepted(serve: dict[str, Any]) -> None:
    ServeSettings.model_validate(serve)
