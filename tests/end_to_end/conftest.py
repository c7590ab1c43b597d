"""Fixtures for tests of the process."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.process import DaemonProcess


@pytest.fixture
def daemons() -> Iterator[list[DaemonProcess]]:
    """A list of daemons that are killed at the end of the test."""
    started: list[DaemonProcess] = []
    yield started
    for daemon in started:
        daemon.end()
