"""TLS between a socket and a connection, whose limits hold from the moment that it is accepted.

asyncio tells a protocol of its connection when the TLS handshake is complete. Until then a connection would neither be
counted nor have a deadline, and silent clients would use up the open files of the process.
"""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from streamlearn.http.connection import READ_S, GuardedConnection


class TlsLayer(SSLProtocol):
    """The protocol of a socket, below the connection's own."""

    def __init__(self, connection: GuardedConnection, context: ssl.SSLContext) -> None:
        super().__init__(
            connection.loop,
            connection,
            context,
            waiter=None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_shutdown_timeout=READ_S,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell the connection, and begin the handshake, which the connection's receive deadline includes."""
        assert isinstance(transport, asyncio.Transport)
        self._connection.accepted(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the connection, which asyncio does after a complete handshake only."""
        self._connection.released()
        super().connection_lost(exc)


def over_tls(connection: type[GuardedConnection], context: ssl.SSLContext) -> Callable[..., TlsLayer]:
    """What uvicorn calls for each connection that it accepts, in place of the connection's class."""

    def accept(**arguments: Any) -> TlsLayer:
        return TlsLayer(connection(**arguments), context)

    return accept
