"""Limits on connections: uvicorn's HTTP/1.1 protocol with a receive deadline and a maximum number of connections.

uvicorn closes idle keep-alive connections, but waits without limit for a first byte, the rest of a header or a body.
Its concurrency limit rejects every new client once silent connections have used it up. Here

- a client must read: when it does not take what is buffered for it within `READ_S`, the connection is aborted;
- a request must arrive completely within `RECEIVE_S` of the connection or of its first byte; an incomplete one is
  answered 408;
- above `max_connections` the connection that has been waiting longest for its client is closed. A new connection is
  refused only while all others are being served.
"""

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_S = 10.0
READ_S = 30.0
MAX_CONNECTIONS = 64
_TOO_SLOW = b'{"error":{"code":"too_slow","message":"expected a whole request within 10 s","hint":"send it faster"}}'


class GuardedConnection(H11Protocol):
    """One client connection."""

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    waiting_since = 0.0
    """Time of the event loop at which the connection began to wait for its client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the receive deadline; close another connection if there are too many."""
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self._start_deadline()
        if len(self.connections) > self.max_connections:
            self._close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the receive deadline."""
        self._cancel_deadline()
        self._cancel_read_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline for the client to read."""
        super().pause_writing()
        self._read_deadline = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads: cancel the deadline."""
        self._cancel_read_deadline()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request, a whole one, or several."""
        self._start_deadline()
        super().data_received(data)
        self._cancel_deadline_if_complete()

    def on_response_complete(self) -> None:
        """Restart the waiting time, and handle a pipelined request."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        self._cancel_deadline_if_complete()

    @property
    def is_waiting(self) -> bool:
        """Whether no response is in progress."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_S, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _cancel_deadline_if_complete(self) -> None:
        partial = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if not partial and self.conn.their_state is not h11.SEND_BODY:
            self._cancel_deadline()

    def _on_deadline(self) -> None:
        """Close the connection, with a 408 if part of a request had arrived."""
        self._deadline = None
        if self.transport.is_closing():
            return
        partial = self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        if partial and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_too_slow()
        self.transport.close()

    def _send_too_slow(self) -> None:
        head = [(b"content-type", b"application/json"), (b"connection", b"close")]
        head.append((b"content-length", str(len(_TOO_SLOW)).encode()))
        is_head = self.conn.their_state is h11.SEND_BODY and self.scope["method"] == "HEAD"
        body = h11.Data(data=b"" if is_head else _TOO_SLOW)
        for event in (h11.Response(status_code=408, headers=head), body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _close_longest_waiting(self) -> None:
        others = [each for each in self.connections if each is not self and isinstance(each, GuardedConnection)]
        waiting = [each for each in others if each.is_waiting and not each.transport.is_closing()]
        longest = min(waiting, key=lambda each: each.waiting_since, default=self)
        self.connections.discard(longest)  # at once: closing takes an iteration of the event loop
        longest.transport.close()
