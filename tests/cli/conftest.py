"""One server for the commands that ask a daemon, reset before each test, and one that answers as it is told."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.serve.doubles import Daemon


@pytest.fixture(scope="session")
def _shared() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.stop()


@pytest.fixture
def daemon(_shared: Daemon) -> Daemon:
    _shared.reset()
    return _shared


Answering = Callable[[bytes], int]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Start a server that sends these bytes to whoever asks, and closes the connection; returns its port."""
    with ExitStack() as stack:

        def start(answer: bytes) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            thread = threading.Thread(target=_answer_all, args=(listener, answer))
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return int(listener.getsockname()[1])

        yield start


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    with suppress(OSError):  # until it is shut down
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)


def whole(body: bytes, status: str = "200 OK") -> bytes:
    """A complete answer."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
