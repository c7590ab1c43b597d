"""The HTTP server: uvicorn in its own thread with its own event loop.

It serves people and programs that the operator trusts. Slow or silent clients hold a connection until it is closed:
put a proxy in front where strangers can connect.
"""

import errno
import logging
import math
import os
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvicorn
from starlette.applications import Starlette

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.secret_files import check_secret_file
from streamlearn.settings import ListenSettings, ServeSettings

GRACE_S = 5.0
MAX_CONNECTIONS = 64
"""Connections that are served at once; a further one gets 503."""

_log = get_logger("http")


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a server listens."""

    host: str
    port: int
    keys: tuple[str, str]
    """The settings of host and port, for messages."""
    instead: str
    """What to do where neither helps."""
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    health: bool = False
    """Whether it serves nothing but health probes."""

    @classmethod
    def for_requests(cls, settings: ListenSettings) -> Self:
        keys = f"{settings.key_prefix}host", f"{settings.key_prefix}port"
        instead = "set serve.enabled: false" if isinstance(settings, ServeSettings) else "choose another port"
        return cls(settings.host, settings.port, keys, instead, settings.tls_certfile, settings.tls_keyfile)

    @classmethod
    def for_health(cls, settings: ServeSettings) -> Self:
        """The listener for health probes: plain HTTP."""
        keys = "serve.health_host", "serve.health_port"
        instead = "leave serve.health_port unset"
        return cls(settings.health_host, settings.health_port or 0, keys, instead, health=True)


class HttpServer:
    """Serves an application between `start` and `stop`; it can be started again."""

    def __init__(
        self,
        app: Starlette,
        listener: Listener,
        *,
        max_connections: int = MAX_CONNECTIONS,
        grace_s: float = GRACE_S,
    ) -> None:
        """Build a server.

        Args:
            app: What it serves. Its lifespan is the server's.
            listener: Where it listens.
            max_connections: Connections that are served at once.
            grace_s: Maximum time for which `stop` waits for requests in flight.
        """
        self._app = app
        self._listener = listener
        self._max_connections = max_connections
        self._grace_s = grace_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._port = listener.port

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
        server = self._server = uvicorn.Server(self._config())
        bound = bind(self._listener)
        self._port = bound.getsockname()[1]
        name = "streamlearn-health" if self._listener.health else "streamlearn-http"
        self._thread = threading.Thread(target=_serve, args=(server, bound), name=name, daemon=True)
        self._thread.start()
        health = {"health": True} if self._listener.health else {}
        _log.info(Event.HTTP_STARTED, host=self._listener.host, port=self._port, **health)

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

    def _config(self) -> uvicorn.Config:
        logger = logging.getLogger("uvicorn.error")
        logger.addHandler(_forward)  # a second call has no effect
        logger.propagate = False
        context = tls_context(self._listener)
        return uvicorn.Config(
            self._app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="auto",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[("x-content-type-options", "nosniff")],
            limit_concurrency=self._max_connections,
            timeout_graceful_shutdown=math.ceil(self._grace_s),
            ssl_context_factory=None if context is None else lambda *_: context,
        )


class _ForwardToEvents(logging.Handler):
    """Logs uvicorn's errors, including tracebacks of handlers, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.error(Event.HTTP_FAILED, message=record.getMessage().strip(), exc_info=record.exc_info)


_forward = _ForwardToEvents()


def tls_context(listener: Listener) -> ssl.SSLContext | None:
    """Load the certificate and its key; None if there is none.

    Raises:
        ConfigError: they cannot be used.
    """
    if listener.tls_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        if listener.tls_keyfile is not None:
            check_secret_file(listener.tls_keyfile)
        context.load_cert_chain(listener.tls_certfile, listener.tls_keyfile, password="")
    except OSError as error:
        raise ConfigError(
            f"tls_certfile {listener.tls_certfile} and tls_keyfile {listener.tls_keyfile}: expected a PEM certificate "
            f"chain and its unencrypted key, found: {error}"
        ) from error
    return context


def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    with bound:
        server.run(sockets=[bound])


def bind(listener: Listener) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address cannot be bound.
    """
    address = listener.host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        bound = socket.create_server((address, listener.port), family=family, backlog=128)
        # Accepted sockets inherit it. asyncio sets it only where the protocol number is stated, which it is not here;
        # without it the second write of a response waits 40 ms for the client's delayed acknowledgment.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except OSError as error:
        host, port = listener.keys
        advice = {
            errno.EADDRINUSE: f"stop what uses it (another streamlearn?) or set {port}; 0 takes a free port",
            errno.EACCES: f"set {port} above 1023; 0 takes a free port",
            errno.EADDRNOTAVAIL: f"set {host} to an address of this machine",
        }.get(error.errno or 0, f"set {host} and {port}, or {listener.instead}")
        # create_server adds the address to its own errors; a name that cannot be resolved has an error of another kind
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(f"{listener.host}:{listener.port} cannot be bound: {reason}; {advice}") from error
