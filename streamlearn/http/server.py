"""The HTTP server: uvicorn in its own thread with its own event loop."""

import asyncio
import errno
import logging
import math
import os
import socket
import ssl
import threading
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Self

import httptools
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.settings import ListenSettings, ServeSettings

# Limits on connections: uvicorn's HTTP/1.1 protocol with a receive deadline and a maximum number of connections.
#
# uvicorn closes idle keep-alive connections, but waits without limit for a first byte, the rest of a header or a body,
# and its parser keeps a header of any length. Its concurrency limit rejects every new client once silent connections
# have used it up. Here
#
# - a client must read: when it takes nothing of what is buffered for it within `READ_S`, the connection is aborted;
# - a request must arrive completely within `RECEIVE_S` of the connection or of its first byte, or of the answer to the
#   request before; an incomplete one is answered 408;
# - a request line and headers beyond `MAX_HEAD` bytes are answered 431;
# - an `Upgrade` header is ignored, and the request answered without it;
# - above `max_connections` the connection that has been waiting longest for its client is aborted. A new connection is
#   refused only while all others are being served.
#
# With TLS all this begins before the handshake; see `TlsLayer`.


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


# TLS between a socket and a connection, whose limits hold from the moment that it is accepted.
#
# asyncio tells a protocol of its connection when the TLS handshake is complete. Until then a connection would neither
# be counted nor have a deadline, and silent clients would use up the open files of the process.


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


_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class DefaultHeaders:
    """Middleware that adds them: nothing is cached, and no content is taken for another type than it states."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_with_defaults(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_defaults)


GRACE_S = 5.0
_BACKLOG = 128  # connections that wait to be accepted; as many are accepted before the first of them is counted

_log = get_logger("http")


class HttpServer:
    """Serves an application between `start` and `stop`; it can be started again."""

    def __init__(
        self,
        app: Starlette,
        settings: ListenSettings,
        *,
        health: bool = False,
        connection: type[GuardedConnection] = GuardedConnection,
        grace_s: float = GRACE_S,
    ) -> None:
        """Build a server.

        Args:
            app: What it serves. Its lifespan is that of the server.
            settings: Where it listens.
            health: Whether to listen on `health_host` and `health_port` of ServeSettings, over plain HTTP.
            connection: The protocol, with its limits.
            grace_s: Maximum time for which `stop` waits for requests in flight.
        """
        self._app = app
        self._listen = _Listen.for_health(settings) if health else _Listen.for_requests(settings)
        self._connection = connection
        self._grace_s = grace_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._port = self._listen.port

    @property
    def port(self) -> int:
        """The bound port; a setting of 0 is resolved by `start`."""
        return self._port

    def start(self) -> None:
        """Bind and serve in the background; accepts connections when it returns. Does nothing while running.

        Raises:
            ConfigError: the address cannot be bound, or the certificate cannot be used.
        """
        if self._thread is not None:
            return
        listen = self._listen
        config = _config(self._app, listen, self._connection, self._grace_s)
        listener = _bind(listen)
        self._port = listener.getsockname()[1]
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=_serve, args=(server, listener), name=listen.thread_name, daemon=True)
        self._thread.start()
        _log.info(Event.HTTP_STARTED, host=listen.host, port=self._port, **({"health": True} if listen.health else {}))

    def stop(self, timeout_s: float | None = None) -> None:
        """Accept no more connections, finish requests in flight and end the thread. Safe to call twice.

        Requests that wait for something must be ended first, in the daemon by closing the job queue; after `timeout_s`,
        by default `grace_s` and a second, they are aborted.
        """
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(self._grace_s + 1.0 if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True  # aborts requests in flight
            self._thread.join(1.0)
        self._server = self._thread = None

    @property
    def is_running(self) -> bool:
        """Whether it serves; false also when it ended by itself, for a reason that was logged."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class _Listen:
    """Where a server listens."""

    host: str
    port: int
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    health: bool = False
    keys: tuple[str, str] = ("serve.health_host", "serve.health_port")
    instead: str = "leave serve.health_port unset"

    @classmethod
    def for_requests(cls, settings: ListenSettings) -> Self:
        keys = settings.key("host"), settings.key("port")
        instead = "set serve.enabled: false" if isinstance(settings, ServeSettings) else "choose another port"
        return cls(
            settings.host, settings.port, settings.tls_certfile, settings.tls_keyfile, keys=keys, instead=instead
        )

    @classmethod
    def for_health(cls, settings: ListenSettings) -> Self:
        assert isinstance(settings, ServeSettings), "only the daemon has a listener for probes"
        return cls(settings.health_host, settings.health_port or 0, health=True)

    @property
    def thread_name(self) -> str:
        return "streamlearn-health" if self.health else "streamlearn-http"


class _ForwardToEvents(logging.Handler):
    """Logs uvicorn's errors, including tracebacks of handlers, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.error(Event.HTTP_FAILED, message=record.getMessage().strip(), exc_info=record.exc_info)


_forward = _ForwardToEvents()


def _config(app: Starlette, listen: _Listen, connection: type[GuardedConnection], grace_s: float) -> uvicorn.Config:
    """Limits on connections; the checks of requests are in guards."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(_forward)  # a second call has no effect
    logger.propagate = False
    context = _context(listen)
    return uvicorn.Config(
        DefaultHeaders(app),
        loop="asyncio",
        http=connection if context is None else over_tls(connection, context),  # type: ignore[arg-type]  # it is called
        ws="none",
        lifespan="auto",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=math.ceil(grace_s),
        backlog=_BACKLOG,
    )


def _context(listen: _Listen) -> ssl.SSLContext | None:
    """What TLS needs; None where it is not configured."""
    if listen.tls_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.tls_certfile, listen.tls_keyfile, password="")
    except OSError as error:
        raise ConfigError(
            f"tls_certfile {listen.tls_certfile} and tls_keyfile {listen.tls_keyfile}: expected a PEM certificate "
            f"chain and its unencrypted key, found: {error}"
        ) from error
    return context


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        server.run(sockets=[listener])
    except Exception:  # noqa: BLE001 - training continues without HTTP
        _log.exception(Event.HTTP_FAILED)
    finally:
        listener.close()


def _bind(listen: _Listen) -> socket.socket:
    address = listen.host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, listen.port), family=family, backlog=_BACKLOG)
        # Accepted sockets inherit it. asyncio sets it only where the protocol number is stated, which it is not here;
        # without it the second write of an answer waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        host, port = listen.keys
        advice = {
            errno.EADDRINUSE: f"stop what uses it (another streamlearn?) or set {port}; 0 takes a free port",
            errno.EACCES: f"set {port} above 1023; 0 takes a free port",
            errno.EADDRNOTAVAIL: f"set {host} to an address of this machine",
        }.get(error.errno or 0, f"set {host} and {port}, or {listen.instead}")
        # create_server adds the address to its own errors; a name that cannot be resolved has an error of another kind
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(f"{listen.host}:{listen.port} cannot be bound: {reason}; {advice}") from error


class HeadAsGet:
    """Middleware that routes HEAD as GET: same status, same headers. The server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server's own scope keeps HEAD
        await self.app(scope, receive, send)
