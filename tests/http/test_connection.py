"""Clients that are silent, slow or too many are disconnected, and requests of other clients are still served."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamlearn.http import server as module
from streamlearn.http.server import HttpServer
from streamlearn.settings import ServeSettings
from tests.serve.doubles import Daemon, finish

DEADLINE_S, MAX_CONNECTIONS = 0.4, 4
BODY = b'{"prompt": "a"}'
HEAD = b"POST /v1/generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A server with few connections and a short deadline."""
    monkeypatch.setattr(module, "RECEIVE_S", DEADLINE_S)
    monkeypatch.setattr(module.GuardedConnection, "max_connections", MAX_CONNECTIONS)
    daemon = Daemon()
    yield daemon
    daemon.stop()


def connect(daemon: Daemon) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", daemon.server.port))
    connection.settimeout(5.0)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Everything received until the server closes the connection."""
    received = b""
    while piece := connection.recv(4096):
        received += piece
    return received


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([], None),
        ([b"GET /livez HTTP/1.1\r\nho"], b"408"),
        ([b"G", b"E", b"T", b" ", b"/", b"l", b"i", b"v"] * 3, b"408"),
        ([HEAD], b"408"),
        ([HEAD + b"{", *[b" "] * 30], b"408"),
    ],
    ids=["silent", "half a head", "a slow head", "no body", "a slow body"],
)
def test_a_request_must_arrive_within_the_deadline(strict: Daemon, pieces: list[bytes], status: bytes | None) -> None:
    """No matter how it is spread out. If part of it arrived, the response is a 408 in the error format."""
    started = time.monotonic()
    with connect(strict) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(DEADLINE_S / 12)
        received = read_to_end(connection)
    assert DEADLINE_S * 0.9 < time.monotonic() - started < DEADLINE_S * 8
    if status is None:
        assert received == b""
    else:
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert json.loads(body)["error"]["code"] == "too_slow"


def test_a_response_may_take_longer_than_the_deadline(strict: Daemon) -> None:
    """The deadline is for receiving only; the next request on the same connection has its own."""

    def slowly(ticket: object) -> None:
        time.sleep(2 * DEADLINE_S)
        finish(ticket)  # type: ignore[arg-type]

    strict.loop.respond = slowly
    assert strict.client.post("/v1/generate", json={"prompt": "a"}).status_code == 200
    assert strict.client.post("/v1/generate", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("more", "then"),
    [(b"\r\n", b""), (HEAD[:20], HEAD[20:] + BODY), (HEAD, BODY)],
    ids=["a line break", "half a head", "a head"],
)
def test_what_arrives_before_the_response_does_not_cut_it_off(strict: Daemon, more: bytes, then: bytes) -> None:
    """However long the job takes. The rest of a request that has begun may follow when it is answered."""
    strict.loop.paused.set()
    with connect(strict) as connection:
        connection.sendall(HEAD + BODY)
        while len(strict.jobs) < 1:
            time.sleep(0.005)
        connection.sendall(more)
        time.sleep(2 * DEADLINE_S)
        strict.loop.paused.clear()
        connection.sendall(then)
        received = b""
        while received.count(b"HTTP/1.1 200") < (2 if then else 1):
            part = connection.recv(4096)
            assert part, f"closed after {received!r}"
            received += part


def test_the_rest_of_a_pipelined_request_must_arrive_within_the_deadline(strict: Daemon) -> None:
    """Which begins when the request before is answered."""
    with connect(strict) as connection:
        connection.sendall(HEAD + BODY + HEAD)
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in received


def test_pipelined_requests_are_each_answered(strict: Daemon) -> None:
    """The deadline of the first request loses no part of the second."""
    with connect(strict) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2 + HEAD + BODY)
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            part = connection.recv(4096)
            assert part, f"closed after {received!r}"
            received += part


def test_many_silent_clients_do_not_block_others(strict: Daemon) -> None:
    """The connection that has waited longest is closed; requests are served before and after."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(strict)) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(10):
            url = f"http://127.0.0.1:{strict.server.port}/livez"
            assert httpx.get(url, timeout=2.0).status_code == 200
        assert read_to_end(silent[0]) == b""


def test_a_client_that_is_being_served_is_never_disconnected(strict: Daemon) -> None:
    """While all connections are being served, a new one is refused."""
    strict.loop.paused.set()
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(strict)) for _ in range(MAX_CONNECTIONS)]
        for each in clients:
            each.sendall(HEAD + BODY)
        deadline = time.monotonic() + 5
        while len(strict.jobs) < 2 and time.monotonic() < deadline:  # the queue holds two; the others get 503
            time.sleep(0.005)
        silent = [stack.enter_context(connect(strict)) for _ in range(3 * MAX_CONNECTIONS)]
        assert read_to_end(silent[0]) == b""
        strict.loop.paused.clear()
        assert sorted(each.recv(12) for each in clients) == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 2


def test_a_head_request_without_its_body_is_closed_at_the_deadline(strict: Daemon) -> None:
    """The 408 of a HEAD request has no body."""
    with connect(strict) as connection:
        connection.sendall(HEAD.replace(b"POST", b"HEAD"))
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert body == b""


def test_what_is_no_request_is_answered_in_the_error_format(strict: Daemon) -> None:
    """As by a client that speaks TLS to a plain listener."""
    with connect(strict) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "not_http"


LARGE = 8_000_000
"""Bytes of an answer that fits no buffer of a socket."""


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """A server with a large answer and a short deadline for reading it."""
    monkeypatch.setattr(module, "READ_S", DEADLINE_S)

    async def answer(_: Request) -> Response:
        return Response(b"x" * LARGE)

    with HttpServer(Starlette(routes=[Route("/", answer)]), ServeSettings(port=0)) as server:
        yield server


@contextmanager
def asking(server: HttpServer) -> Iterator[socket.socket]:
    """A connection with a small buffer that has asked for the answer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        connection.settimeout(5.0)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        yield connection


def test_a_client_that_reads_slowly_gets_its_whole_answer(large: HttpServer) -> None:
    """However often the deadline passes: it takes something each time."""
    began, received = time.monotonic(), 0
    with asking(large) as connection:
        while part := connection.recv(40_000):
            received += len(part)
            time.sleep(DEADLINE_S * 4 * len(part) / LARGE)
    assert received > LARGE
    assert time.monotonic() - began > 3 * DEADLINE_S


def test_a_client_that_stops_reading_is_disconnected(large: HttpServer) -> None:
    """After the deadline; what it reads later is not the whole answer."""
    with asking(large) as connection:
        time.sleep(3 * DEADLINE_S)
        received = 0
        with suppress(ConnectionResetError):
            while part := connection.recv(40_000):
                received += len(part)
    assert received < LARGE


CHUNKED = HEAD.replace(b"content-length: 15", b"transfer-encoding: chunked")


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 4096),
        (b"GET /livez HTTP/1.1\r\nhost: ", b"a" * 4096),
        (b"GET /livez HTTP/1.1\r\n", b"x: y\r\n" * 500),
        (CHUNKED + b"0\r\nx: ", b"a" * 4096),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 500),
        (CHUNKED + b"5;x=", b"a" * 4096),
    ],
    ids=["target", "header", "headers", "trailer", "trailers", "chunk extension"],
)
def test_an_endless_head_is_refused(strict: Daemon, begin: bytes, piece: bytes) -> None:
    """Long before the deadline, and without keeping it."""
    with connect(strict) as connection:
        connection.sendall(begin)
        sent, received = 0, b""
        while not received and sent < 1 << 20:
            try:
                connection.sendall(piece)
                connection.settimeout(0.002)
                received = connection.recv(4096)
            except TimeoutError:
                sent += len(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
    assert sent < 4 * module.MAX_HEAD
    assert received.startswith(b"HTTP/1.1 431"), received


def test_a_head_within_the_limit_is_accepted(strict: Daemon) -> None:
    """In one piece or many."""
    assert strict.client.get("/livez", headers={"x-long": "a" * (module.MAX_HEAD - 1024)}).status_code == 200


def test_a_request_that_comes_byte_by_byte_is_answered(strict: Daemon) -> None:
    """Within the deadline."""
    with connect(strict) as connection:
        for byte in b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.fixture
def echo() -> Iterator[HttpServer]:
    """A server that answers with what it received."""

    async def answer(request: Request) -> Response:
        received = f"{request.method} {request.url.path} {request.headers.get('upgrade')} "
        return Response(received.encode() + await request.body())

    with HttpServer(Starlette(routes=[Route("/{path}", answer, methods=["GET", "POST"])]), ServeSettings(port=0)) as it:
        yield it


def answers(server: HttpServer, *pieces: bytes) -> list[bytes]:
    """The answers to what is sent in these pieces, and then a request that closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)
        for piece in (*pieces, LAST):
            connection.sendall(piece)
            time.sleep(0.0005)
        received = read_to_end(connection)
    return [each.partition(b"\r\n\r\n")[2] for each in each_answer(received)]


def each_answer(received: bytes) -> list[bytes]:
    """The answers in what was received, from the status on."""
    return re.split(rb"HTTP/1\.1 (?=\d)", received)[1:]


BODY_LIKE_A_REQUEST = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
SIMPLE = b"GET /b HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
WITH_LENGTH = b"POST /a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 43\r\n\r\n" + BODY_LIKE_A_REQUEST
IN_CHUNKS = (
    b"POST /a HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2b\r\n" + BODY_LIKE_A_REQUEST + b"\r\n0\r\n\r\n"
)
UPGRADES = {
    "java": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n",
    "unknown": b"upgrade: foo\r\nconnection: keep-alive\r\nconnection: upgrade\r\n",
    "twice": b"Upgrade: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n",
}


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["bytes", "sevens", "whole"])
@pytest.mark.parametrize("request_", [WITH_LENGTH, IN_CHUNKS], ids=["length", "chunks"])
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
def test_an_upgrade_header_is_ignored(echo: HttpServer, upgrade: bytes, request_: bytes, size: int) -> None:
    """A body, even one that looks like a request, belongs to its request, in however many packets both come."""
    sent = request_.replace(b"host:", upgrade + b"host:", 1)
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert answers(echo, *pieces) == [b"POST /a None " + BODY_LIKE_A_REQUEST, b"GET /last None "]


def test_requests_after_one_with_an_upgrade_header_are_answered(echo: HttpServer) -> None:
    """In the same packet, with such a header or without, with a body or without."""
    upgraded = [each.replace(b"host:", UPGRADES["java"] + b"host:", 1) for each in (SIMPLE, WITH_LENGTH, IN_CHUNKS)]
    expected = [b"GET /b None ", *[b"POST /a None " + BODY_LIKE_A_REQUEST] * 2]
    sent = b"".join([*upgraded, SIMPLE, *upgraded])
    assert answers(echo, sent) == [*expected, b"GET /b None ", *expected, b"GET /last None "]


def test_an_upgrade_head_and_its_body_may_come_apart(echo: HttpServer) -> None:
    """The client waits for 100 Continue before it sends the body."""
    head = HEAD.replace(b"/v1/generate", b"/a").replace(b"host:", UPGRADES["java"] + b"expect: 100-continue\r\nhost:")
    with socket.create_connection(("127.0.0.1", echo.port)) as connection:
        connection.settimeout(5.0)
        connection.sendall(head)
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY + LAST)
        assert b"\r\n\r\nPOST /a None " + BODY in read_to_end(connection)


NO_PATH = (
    b"CONNECT host:443 HTTP/1.1\r\nhost: host:443\r\n\r\n",
    b"CONNECT http://host/b HTTP/1.1\r\nhost: host\r\n\r\n",
    b"CONNECT host:443 HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n",
)


@pytest.mark.parametrize("before", [[], [SIMPLE], [SIMPLE, SIMPLE, WITH_LENGTH]], ids=["first", "second", "fourth"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])
@pytest.mark.parametrize("request_", NO_PATH)
def test_a_request_for_no_path_is_refused(
    echo: HttpServer, caplog: pytest.LogCaptureFixture, request_: bytes, at_once: bool, before: list[bytes]
) -> None:
    """As by a client that takes the server for a proxy. Requests before it are answered, what follows is not."""
    with socket.create_connection(("127.0.0.1", echo.port)) as connection:
        connection.settimeout(5.0)
        sent = [*before, request_]
        for piece in [b"".join(sent) + SIMPLE] if at_once else sent:
            connection.sendall(piece)
            time.sleep(0.02)
        *answered, refused = each_answer(read_to_end(connection))
    assert [each[:3] for each in answered] == [b"200"] * len(before)
    assert refused.startswith(b"400")
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_http"
    assert caplog.records == [], "a traceback"


def test_a_head_request_for_no_path_is_refused_without_a_body(echo: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", echo.port)) as connection:
        connection.settimeout(5.0)
        connection.sendall(NO_PATH[-1].replace(b"GET", b"HEAD"))
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert body == b""


def test_a_refusal_waits_for_the_answer_before_it(strict: Daemon) -> None:
    """However long that takes; meanwhile nothing that follows is kept."""
    strict.loop.paused.set()
    with connect(strict) as connection:
        connection.sendall(HEAD + BODY + NO_PATH[0])
        while len(strict.jobs) < 1:
            time.sleep(0.005)
        connection.sendall(b"x" * (4 * module.MAX_HEAD))
        time.sleep(2 * DEADLINE_S)
        strict.loop.paused.clear()
        received = read_to_end(connection)
    assert [each[:3] for each in each_answer(received)] == [b"200", b"400"]
