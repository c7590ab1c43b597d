"""The HTTP server: uvicorn in its own thread with its own event loop."""

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
from streamlearn.http.connection import GuardedConnection
from streamlearn.http.default_headers import DefaultHeaders
from streamlearn.http.tls_layer import over_tls
from streamlearn.settings import ListenSettings, ServeSettings

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
