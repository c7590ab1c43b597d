"""The daemon's endpoint, on which the guards and the server are tested, and a certificate for it."""

from tests.serve.conftest import _shared, client, daemon

__all__ = ["_shared", "client", "daemon"]
