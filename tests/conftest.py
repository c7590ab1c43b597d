"""Fixtures that more than one folder uses."""

from tests.broker import broker, leaked_sockets

__all__ = ["broker", "leaked_sockets"]
