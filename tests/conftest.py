"""Fixtures that more than one folder uses."""

from collections.abc import Iterator

import pytest
import structlog

from tests.broker import broker, leaked_sockets
from tests.learners import make_learner, tiny

__all__ = ["broker", "leaked_sockets", "make_learner", "quiet_again", "tiny"]


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Where a command of a test sent the log lines, the next test does not."""
    yield
    structlog.reset_defaults()
