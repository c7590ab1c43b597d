"""Fixtures that more than one folder uses."""

from tests.broker import broker, leaked_sockets
from tests.learners import make_learner, tiny

__all__ = ["broker", "leaked_sockets", "make_learner", "tiny"]
