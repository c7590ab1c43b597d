"""What a connection may do: uvicorn's own HTTP/1.1 protocol, with a deadline for receiving and a bound on their number.

uvicorn closes an idle connection after an answer, but waits without end for a first byte, for the rest of a header or
for a body, and its limit of concurrency turns everyone away once silent connections have used it up. Here

- a request must have arrived whole `RECEIVE_S` after the connection was made or its first byte came; one that has
  begun is answered 408;
- of more than `MAX_CONNECTIONS` the one that has waited longest for its client goes; only while all of them are being
  answered is a new one turned away.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_S = 10.0
MAX_CONNECTIONS = 64
_TOO_SLOW = b'{"error":{"code":"too_slow","message":"a request must arrive whole within 10 s","hint":"send it faster"}}'


class GuardedConnection(H11Protocol):
    """One client."""

    _deadline: asyncio.TimerHandle | None = None
    waiting_since = 0.0
    """When the loop last had nothing to do for this client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's own
        """Take its place, and wait for a request."""
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self._expect_request()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is expected of it."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some of a request, the whole of it, or more than one."""
        self._expect_request()
        super().data_received(data)
        self._look_what_is_missing()

    def on_response_complete(self) -> None:
        """The next request may be here already."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        self._look_what_is_missing()

    @property
    def is_waiting(self) -> bool:
        """Whether nobody works on an answer for it."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_S, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_what_is_missing(self) -> None:
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if not begun and self.conn.their_state is not h11.SEND_BODY:
            self._expect_nothing()

    def _give_up(self) -> None:
        """The deadline has passed: say so where something had come, and close."""
        self._deadline = None
        if self.transport.is_closing():
            return
        begun = self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = [(b"content-type", b"application/json"), (b"connection", b"close")]
            head.append((b"content-length", str(len(_TOO_SLOW)).encode()))
            for event in (h11.Response(status_code=408, headers=head), h11.Data(data=_TOO_SLOW), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _make_room(self) -> None:
        others = [each for each in self.connections if each is not self and isinstance(each, GuardedConnection)]
        waiting = [each for each in others if each.is_waiting and not each.transport.is_closing()]
        leaver = min(waiting, key=lambda each: each.waiting_since, default=self)
        self.connections.discard(leaver)  # at once: closing takes a turn of the event loop
        leaver.transport.close()
