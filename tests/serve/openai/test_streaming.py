"""Streams while they run: pieces on time, slow readers, errors in the middle, clients that leave."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest

from streamlearn.errors import SnapshotError
from streamlearn.jobs.queue import GenerateJob, GenerationStart, GenerationStream, Ticket
from tests.serve.doubles import KNOWN, Daemon, finish
from tests.serve.test_app import raw_post, wait_until

BODY: dict[str, Any] = {"model": "streamlearn", "prompt": "x", "stream": True}
PIECE = "0123456789" * 10_000


@pytest.fixture
def running(daemon: Daemon) -> Iterator[list[Ticket]]:
    """The jobs that were begun; each runs until its test ends it."""
    taken: list[Ticket] = []

    def respond(ticket: Ticket) -> None:
        stream_of(ticket).begin(GenerationStart(step=42, prompt_tokens=5, route=KNOWN))
        taken.append(ticket)

    daemon.loop.respond = respond
    yield taken
    for ticket in taken:
        ticket.future.cancel()


def stream_of(ticket: Ticket) -> GenerationStream:
    assert isinstance(ticket.job, GenerateJob)
    assert ticket.job.stream is not None
    return ticket.job.stream


def post(daemon: Daemon, receive_buffer: int | None = None) -> socket.socket:
    """A client that has sent its request."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(5.0)
    client.connect(("127.0.0.1", daemon.server.port))
    client.sendall(raw_post("/v1/completions", orjson.dumps(BODY)))
    return client


def read_until(client: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        part = client.recv(65_536)
        assert part, f"closed after {found[-1000:]!r}"
        found += part
    return found


def test_a_piece_arrives_before_the_next_is_written(daemon: Daemon, running: list[Ticket]) -> None:
    """The client reads each while the job runs."""
    with post(daemon) as client:
        wait_until(lambda: running)
        for piece in ("one", "two"):
            stream_of(running[0]).write(piece)
            assert f'"text":"{piece}"'.encode() in read_until(client, piece.encode() + b'"')
        finish(running[0])
        read_until(client, b"data: [DONE]\n\n")


def test_a_failure_in_the_middle_is_an_event(daemon: Daemon, running: list[Ticket]) -> None:
    """OpenAI's client raises it; the stream is not complete."""
    failures: dict[str, Exception] = {"disk full": SnapshotError("disk full"), "failed inside": KeyError("secret")}
    for message, failure in failures.items():
        with openai.OpenAI(base_url=f"{daemon.client.base_url}/v1/", api_key="x", max_retries=0) as client:
            stream = client.completions.create(**BODY)
            wait_until(lambda: running)
            ticket = running.pop()
            stream_of(ticket).write("one")
            assert next(iter(stream)).choices[0].text == "one"
            ticket.fail(failure)
            with pytest.raises(openai.APIError, match=message) as caught:
                list(stream)
        assert caught.value.type == "server_error"
    with post(daemon) as raw:
        wait_until(lambda: running)
        running[0].fail(KeyError("secret"))
        text = read_until(raw, b"0\r\n\r\n")
    assert b"DONE" not in text
    assert b"secret" not in text


def test_a_client_that_leaves_cancels_its_running_job(daemon: Daemon, running: list[Ticket]) -> None:
    """With a piece on its way or not; a queued one is withdrawn."""
    for pieces in ([], ["one"]):
        with post(daemon) as client:
            wait_until(lambda: running)
            for piece in pieces:
                stream_of(running[0]).write(piece)
                read_until(client, b"one")
            assert not running[0].cancelled
        wait_until(lambda: running[0].cancelled)
        running.clear()
    daemon.loop.paused.set()
    with post(daemon):
        wait_until(lambda: len(daemon.jobs) == 1)
    wait_until(lambda: len(daemon.jobs) == 0)


def test_a_deadline_ends_a_stream_with_an_error() -> None:
    """And cancels its job; before the start it is a 504."""
    daemon, taken = Daemon(job_deadline_s=0.2), list[Ticket]()
    try:
        daemon.loop.respond = taken.append
        answer = daemon.client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "too_slow")

        def begin(ticket: Ticket) -> None:
            taken.append(ticket)
            stream_of(ticket).begin(GenerationStart(step=42, prompt_tokens=5, route=KNOWN))

        daemon.loop.respond = begin
        answer = daemon.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert '"code":"too_slow"' in answer.text
        assert "DONE" not in answer.text
        wait_until(lambda: all(ticket.cancelled for ticket in taken))
    finally:
        daemon.stop()


def test_a_slow_reader_does_not_hold_up_the_writer(daemon: Daemon, running: list[Ticket]) -> None:
    """Who reads nothing costs the writer no time, and gets the whole text once it reads."""
    with post(daemon, receive_buffer=4096) as client:
        wait_until(lambda: running)
        stream = stream_of(running[0])
        began = time.monotonic()
        for _ in range(60):
            stream.write(PIECE)
        assert time.monotonic() - began < 5.0  # a blocked writer would wait until the client reads
        finish(running[0])
        found = read_until(client, b"data: [DONE]\n\n")
    assert found.count(PIECE[:10].encode()) == 60 * len(PIECE) // 10
