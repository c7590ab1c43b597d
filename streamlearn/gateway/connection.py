"""Limits on the gateway's connections."""

from typing import ClassVar

from streamlearn.http.connection import GuardedConnection


class GatewayConnection(GuardedConnection):
    """One client connection. Each may wait minutes for its answer, so there may be many."""

    max_connections: ClassVar[int] = 400  # twice that in sockets is below the usual limit of 1024 open files
