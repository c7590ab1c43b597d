"""Clients that send nothing, or too slowly, or come in crowds: they go, and whoever asks properly is answered."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from streamlearn.serve import connection as room

from .doubles import Daemon, answer

DEADLINE_S, MOST = 0.4, 4
BODY = b'{"prompt": "a"}'
HEAD = b"POST /v1/generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A server of few connections and little patience."""
    monkeypatch.setattr(room, "RECEIVE_S", DEADLINE_S)
    monkeypatch.setattr(room, "MAX_CONNECTIONS", MOST)
    daemon = Daemon()
    yield daemon
    daemon.stop()


def connect(daemon: Daemon) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", daemon.server.port))
    made.settimeout(5.0)
    return made


def told(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    heard = b""
    while piece := connection.recv(4096):
        heard += piece
    return heard


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([], None),
        ([b"GET /livez HTTP/1.1\r\nho"], b"408"),
        ([b"G", b"E", b"T", b" ", b"/", b"l", b"i", b"v"] * 3, b"408"),
        ([HEAD], b"408"),
        ([HEAD + b"{", *[b" "] * 30], b"408"),
    ],
    ids=["silent", "half a head", "a trickle", "no body", "a trickling body"],
)
def test_a_request_must_arrive_within_the_deadline(strict: Daemon, pieces: list[bytes], status: bytes | None) -> None:
    """However it is spread out; where something had come, the answer says why in the one shape."""
    started = time.monotonic()
    with connect(strict) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(DEADLINE_S / 12)
        heard = told(connection)
    assert DEADLINE_S * 0.9 < time.monotonic() - started < DEADLINE_S * 8
    if status is None:
        assert heard == b""
    else:
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert json.loads(body)["error"]["code"] == "too_slow"


def test_an_answer_may_take_longer_than_the_deadline(strict: Daemon) -> None:
    """It is for receiving alone; the next request on the same connection has one of its own."""

    def slowly(ticket: object) -> None:
        time.sleep(2 * DEADLINE_S)
        answer(ticket)  # type: ignore[arg-type]

    strict.loop.respond = slowly
    assert strict.client.post("/v1/generate", json={"prompt": "a"}).status_code == 200
    assert strict.client.post("/v1/generate", json={"prompt": "a"}).status_code == 200


def test_requests_in_one_piece_are_each_answered(strict: Daemon) -> None:
    """Pipelined: nothing of the second is lost to the deadline of the first."""
    with connect(strict) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2 + HEAD + BODY)
        heard = b""
        while heard.count(b"HTTP/1.1 200") < 3:
            heard += connection.recv(4096)


def test_a_crowd_of_silent_clients_keeps_nobody_out(strict: Daemon) -> None:
    """The one that has waited longest goes; requests are answered, before and after."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(strict)) for _ in range(3 * MOST)]
        for _ in range(10):
            url = f"http://127.0.0.1:{strict.server.port}/livez"
            assert httpx.get(url, timeout=2.0).status_code == 200
        assert told(crowd[0]) == b""


def test_a_client_that_is_being_answered_is_never_put_out(strict: Daemon) -> None:
    """While all are, a new one is turned away."""
    strict.loop.paused.set()
    with ExitStack() as stack:
        asking = [stack.enter_context(connect(strict)) for _ in range(MOST)]
        for each in asking:
            each.sendall(HEAD + BODY)
        deadline = time.monotonic() + 5
        while len(strict.jobs) < 2 and time.monotonic() < deadline:  # the queue holds two; the others are told so
            time.sleep(0.005)
        crowd = [stack.enter_context(connect(strict)) for _ in range(3 * MOST)]
        assert told(crowd[0]) == b""
        strict.loop.paused.clear()
        assert sorted(each.recv(12) for each in asking) == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 2
