"""Fixtures shared by several folders."""

from collections.abc import Iterator

import pytest
import structlog

from streamlearn.events import configure_logging
from tests.broker import broker, leaked_sockets
from tests.end_to_end.process import DaemonProcess
from tests.learners import make_learner, tiny

__all__ = ["broker", "leaked_sockets", "make_learner", "quiet_again", "tiny"]


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Log as a command does, and restore structlog's defaults afterwards."""
    configure_logging("debug")
    yield
    structlog.reset_defaults()


@pytest.fixture
def daemons() -> Iterator[list[DaemonProcess]]:
    """A list of daemons that are killed at the end of the test."""
    started: list[DaemonProcess] = []
    yield started
    for daemon in started:
        daemon.end()
