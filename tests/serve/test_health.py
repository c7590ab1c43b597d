"""The health listener: liveness and readiness for probes, on any address and for any Host, and nothing else."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from streamlearn.errors import ConfigError
from streamlearn.http.server import HttpServer, Listener
from streamlearn.serve.app import health_app
from streamlearn.settings import ServeSettings
from streamlearn.status import Board

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
        assert httpx2.get(f"http://{address}:{server.port}/livez").json()["alive"] is True
        assert httpx2.get(f"http://{address}:{server.port}/readyz").json()["ready"] is True


@pytest.mark.parametrize("host", ["10.1.2.3:8086", "evil.example"])
def test_every_host_is_accepted(probe: httpx2.Client, host: str) -> None:
    """And every Origin: there is nothing that another site could not know."""
    for path in ("/livez", "/readyz"):
        assert probe.get(path, headers={"host": host}).status_code == 200
        assert probe.get(path, headers={"origin": "https://evil.example"}).status_code == 200


def test_responses_equal_those_of_the_main_endpoint(probe: httpx2.Client, client: httpx2.Client) -> None:
    for path in ("/livez", "/readyz"):
        assert probe.get(path).json() == client.get(path).json()
        assert set(probe.get(path).headers) == set(client.get(path).headers)


@pytest.mark.parametrize("path", ["/v1/status", "/openapi.json", "/livez/"])
def test_nothing_else_is_served(probe: httpx2.Client, path: str) -> None:
    answer = probe.get(path)
    assert answer.status_code == probe.head(path).status_code == 404
    assert answer.json()["error"]["hint"] == "this port serves only GET /livez and GET /readyz"


def test_a_port_in_use_names_the_setting_to_change(board: Board, server: HttpServer) -> None:
    taken = Listener.for_health(ServeSettings(health_port=server.port))
    with pytest.raises(ConfigError, match=rf"0\.0\.0\.0:{server.port} cannot be bound: .* or set serve.health_port"):
        HttpServer(health_app(board), taken).start()


@pytest.mark.parametrize("serve", [{"port": 8083, "health_port": 8083}, {"health_port": 65536}, {"health_port": -1}])
def test_an_unusable_health_port_is_refused(serve: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="health_port"):
        ServeSettings.model_validate(serve)
