"""One server for the commands that ask a daemon, reset before each test."""

from collections.abc import Iterator

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
