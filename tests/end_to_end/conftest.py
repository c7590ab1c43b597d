"""What every test of the process needs."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.process import DaemonProcess


@pytest.fixture
def daemons() -> Iterator[list[DaemonProcess]]:
    """Whatever a test starts is ended with it."""
    started: list[DaemonProcess] = []
    yield started
    for daemon in started:
        daemon.end()
