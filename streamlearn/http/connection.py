"""Limits on connections: uvicorn's HTTP/1.1 protocol with a receive deadline and a maximum number of connections.

uvicorn closes idle keep-alive connections, but waits without limit for a first byte, the rest of a header or a body,
and its parser keeps a header of any length. Its concurrency limit rejects every new client once silent connections have
used it up. Here

- a client must read: when it takes nothing of what is buffered for it within `READ_S`, the connection is aborted;
- a request must arrive completely within `RECEIVE_S` of the connection or of its first byte, or of the answer to the
  request before; an incomplete one is answered 408;
- a request line and headers beyond `MAX_HEAD` bytes are answered 431;
- an `Upgrade` header is ignored, and the request answered without it;
- above `max_connections` the connection that has been waiting longest for its client is aborted. A new connection is
  refused only while all others are being served.

With TLS all this begins before the handshake; see `TlsLayer`.
"""

import asyncio
from http import HTTPStatus
from typing import ClassVar

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RECEIVE_S = 10.0
READ_S = 30.0
MAX_CONNECTIONS = 64
MAX_HEAD = 16 << 10
_TOO_SLOW = {"code": "too_slow", "message": "expected a whole request within 10 s", "hint": "send it faster"}
_MALFORMED = {
    "code": "not_http",
    "message": "expected a request of HTTP/1.1 for a path such as /livez, found none",
    "hint": "use http:// or https:// as the server is configured, and do not use it as a proxy",
}
_TOO_LARGE = {
    "code": "headers_too_large",
    "message": f"expected a request line and headers of at most {MAX_HEAD} bytes",
    "hint": "send fewer or shorter headers",
}


class GuardedConnection(HttpToolsProtocol):
    """One client connection."""

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    _carrier: asyncio.Transport | None = None
    """The socket's transport; with TLS, the one below `transport`."""
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    """Size of the write buffer at the last start of the read deadline."""
    waiting_since = 0.0
    """Time of the event loop at which the connection began to wait for its client."""
    _is_receiving = False
    """Whether a part of a request has arrived, and not the whole."""
    _is_in_head = False
    _head_bytes = 0
    _unparsed_bytes = 0
    """Since the parser last told of anything."""
    _refusal: tuple[HTTPStatus, dict[str, str]] | None = None
    """Answer to a request that is refused once those before it are answered; whatever follows is not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """The connection can be used."""
        super().connection_made(transport)
        if self._carrier is None:
            self.accepted(transport)

    def accepted(self, carrier: asyncio.Transport) -> None:
        """Count the connection and start the receive deadline; abort another connection if there are too many."""
        self._carrier = carrier
        self.transport = self.transport or carrier  # a TLS connection has none of its own yet
        self.connections.add(self)
        self.waiting_since = self.loop.time()
        self._start_deadline()
        if len(self.connections) > self.max_connections:
            self._abort_longest_waiting()

    def released(self) -> None:
        """The socket is closed: count the connection no longer, and cancel its deadlines. Safe to call twice."""
        self.connections.discard(self)
        self._cancel_deadline()
        self._cancel_read_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.released()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline for the client to read."""
        super().pause_writing()
        self._start_read_deadline()

    def resume_writing(self) -> None:
        """The client reads: cancel the deadline."""
        self._cancel_read_deadline()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request, a whole one, or several."""
        if self._refusal is not None:
            return
        self._start_deadline()
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST, _MALFORMED)
        else:
            if self._head_bytes + self._unparsed_bytes > MAX_HEAD and self._is_receiving:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)
        if not self.is_waiting:  # even if more has arrived: a line break, or the start of the next request
            self._cancel_deadline()

    def _parse(self, data: memoryview) -> None:
        """Feed the parser, without the `Upgrade` headers, which a server may ignore (RFC 9110, section 7.8).

        After the head of a request with such a header the parser takes HTTP to be over: it would skip the body, and
        parse it as the next request. So it gets that head again without the header, and then what follows.

        Raises:
            HttpParserError: what was received is no request.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as end:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT, and this is no proxy") from end
                self.parser.feed_data(self._head_without_upgrade())
                data = data[end.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        request_line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([request_line, *headers, b"", b""])

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_receiving = self._is_in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line's target."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after a chunked body a trailer."""
        self._head_bytes += len(name) + len(value)
        self._unparsed_bytes = 0
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body begins, unless the head is parsed again; see `_parse`."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._is_in_head, self._unparsed_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there, unless its head is parsed again; see `_parse`."""
        if self.parser.should_upgrade():
            return
        self._is_receiving = False
        self._head_bytes = self._unparsed_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Restart the waiting time, and handle a pipelined request, whose deadline begins now if a part is missing."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        if self._refusal is not None:
            self._refuse(*self._refusal)
        elif self._is_receiving:
            self._start_deadline()

    @property
    def is_waiting(self) -> bool:
        """Whether no response is in progress."""
        return not self.pipeline and (self._is_idle or self.cycle.more_body)

    @property
    def _is_idle(self) -> bool:
        """Whether all requests whose heads have arrived are answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_S, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def _buffered_bytes(self) -> int:
        return self._carrier.get_write_buffer_size() if self._carrier is not None else 0

    def _start_read_deadline(self) -> None:
        self._unread_bytes = self._buffered_bytes
        self._read_deadline = self.loop.call_later(READ_S, self._on_read_deadline)

    def _on_read_deadline(self) -> None:
        """Abort the connection unless the client has taken something; nothing is added until the buffer is short."""
        if self._buffered_bytes < self._unread_bytes:
            self._start_read_deadline()
        else:
            self._read_deadline = None
            self.transport.abort()

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _on_deadline(self) -> None:
        """Close the connection, with a 408 if part of a request had arrived."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._is_receiving:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, _TOO_SLOW)
        self.transport.close()

    def _refuse(self, status: HTTPStatus, error: dict[str, str]) -> None:
        """Answer the request that is arriving with an error, after those before it, and close the connection.

        Without an answer, if one has begun.
        """
        if self._is_in_head and not self._is_idle:
            self._refusal = status, error
            return
        if (
            not self.transport.is_closing()
            and not self.pipeline
            and (self._is_in_head or not self.cycle.response_started)
        ):
            is_head = self.scope.get("method") == "HEAD"
            body = orjson.dumps({"error": error})
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + (b"" if is_head else body))
        self.transport.close()

    def _abort_longest_waiting(self) -> None:
        """Abort the connection that waits longest, even if it is closing: a TLS client may draw that out."""
        others = [each for each in self.connections if each is not self and isinstance(each, GuardedConnection)]
        waiting = [each for each in others if each.is_waiting]
        longest = min(waiting, key=lambda each: each.waiting_since, default=self)
        self.connections.discard(longest)  # at once: aborting takes an iteration of the event loop
        if longest._carrier is not None:
            longest._carrier.abort()
