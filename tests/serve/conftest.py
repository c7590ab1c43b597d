"""One server for all tests in this folder, reset before each test."""

from collections.abc import Iterator

import httpx2
import pytest

from .doubles import Daemon


@pytest.fixture(scope="session")
def _shared() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.stop()


@pytest.fixture
def daemon(_shared: Daemon) -> Daemon:
    _shared.reset()
    return _shared


@pytest.fixture
def client(daemon: Daemon) -> httpx2.Client:
    return daemon.client
