"""The limits on connections hold before the TLS handshake too."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamlearn.errors import ConfigError
from streamlearn.gateway.app import GatewayConnection
from streamlearn.http import server as module
from streamlearn.http.server import GuardedConnection, HttpServer
from streamlearn.settings import ServeSettings
from tests.http.test_connection import read_to_end

MAX_CONNECTIONS = 4


async def answer(_: Request) -> Response:
    return Response(b"answer")


@pytest.fixture(params=[GuardedConnection, GatewayConnection])
def server(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[HttpServer]:
    """A TLS server with few connections."""
    monkeypatch.setattr(request.param, "max_connections", MAX_CONNECTIONS)
    chain, key = certificate
    app = Starlette(routes=[Route("/", answer)])
    settings = ServeSettings(port=0, tls_certfile=chain, tls_keyfile=key)
    with HttpServer(app, settings, connection=request.param) as running:
        yield running


def connect(server: HttpServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(3.0)
    return connection


def get(server: HttpServer, certificate: tuple[Path, Path]) -> httpx.Response:
    trusted = ssl.create_default_context(cafile=certificate[0])
    return httpx.get(f"https://127.0.0.1:{server.port}/", verify=trusted, timeout=3.0)


def test_silent_clients_are_counted_before_the_handshake(server: HttpServer, certificate: tuple[Path, Path]) -> None:
    """The one that has waited longest is disconnected, and others are served."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        assert get(server, certificate).content == b"answer"
        assert read_to_end(silent[0]) == b""
        silent[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):  # it is still within the maximum
            silent[-1].recv(1)


def test_clients_that_only_shake_hands_are_counted(server: HttpServer, certificate: tuple[Path, Path]) -> None:
    """And disconnected without waiting for their part of an orderly end."""
    trusted = ssl.create_default_context(cafile=certificate[0])
    with ExitStack() as stack:
        silent = [
            stack.enter_context(trusted.wrap_socket(connect(server), server_hostname="localhost"))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        assert get(server, certificate).content == b"answer"
        assert silent[0].recv(1) == b""


def test_the_handshake_must_be_complete_within_the_deadline(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection on which nothing or too little comes is closed."""
    monkeypatch.setattr(module, "RECEIVE_S", 0.4)
    for sent in (b"", b"\x16\x03\x01"):
        began = time.monotonic()
        with connect(server) as connection:
            connection.sendall(sent)
            assert read_to_end(connection) == b""
        assert 0.3 < time.monotonic() - began < 3.0


def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """Before the address is bound."""
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    settings = ServeSettings(port=0, tls_certfile=chain, tls_keyfile=key)
    with pytest.raises(ConfigError, match=r"tls_certfile .*chain\.pem and tls_keyfile .*: expected a PEM certificate"):
        HttpServer(Starlette(), settings).start()
