"""The HTTP server: uvicorn in its own thread with its own event loop."""

import errno
import logging
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvicorn
from fastapi import FastAPI

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.serve.connection import GuardedConnection
from streamlearn.settings import ServeSettings

STOP_TIMEOUT_S = 6.0  # uvicorn's graceful 5 s plus 1 s

_log = get_logger("serve")


class HttpServer:
    """Serves an application between `start` and `stop`; it can be started again."""

    def __init__(self, app: FastAPI, settings: ServeSettings, *, health: bool = False) -> None:
        """With `health` it listens on `serve.health_host` and `serve.health_port`, over plain HTTP."""
        self._app = app
        self._listen = _Listen.for_health(settings) if health else _Listen.for_requests(settings)
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
            ConfigError: the address cannot be bound.
        """
        if self._thread is not None:
            return
        listen = self._listen
        listener = _bind(listen)
        self._port = listener.getsockname()[1]
        server = self._server = uvicorn.Server(_config(self._app, listen))
        self._thread = threading.Thread(target=_serve, args=(server, listener), name=listen.thread_name, daemon=True)
        self._thread.start()
        _log.info(Event.HTTP_STARTED, host=listen.host, port=self._port, **({"health": True} if listen.health else {}))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Accept no more connections, finish requests in flight and end the thread. Safe to call twice.

        Close the job queue first: it ends requests that wait for a job.
        """
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True  # aborts requests in flight
            self._thread.join(1.0)
        self._server = self._thread = None

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

    @classmethod
    def for_requests(cls, settings: ServeSettings) -> Self:
        return cls(settings.host, settings.port, settings.tls_certfile, settings.tls_keyfile)

    @classmethod
    def for_health(cls, settings: ServeSettings) -> Self:
        return cls(settings.health_host, settings.health_port or 0, health=True)

    @property
    def thread_name(self) -> str:
        return "streamlearn-health" if self.health else "streamlearn-http"


class _ForwardToEvents(logging.Handler):
    """Logs uvicorn's errors, including tracebacks of handlers, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.error(Event.HTTP_FAILED, message=record.getMessage().strip(), exc_info=record.exc_info)


_forward = _ForwardToEvents()


def _config(app: FastAPI, listen: _Listen) -> uvicorn.Config:
    """Limits on connections; the checks of requests are in guards."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(_forward)  # a second call has no effect
    logger.propagate = False
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=GuardedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=[("cache-control", "no-store"), ("x-content-type-options", "nosniff")],
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=16384,
        ssl_certfile=listen.tls_certfile,
        ssl_keyfile=listen.tls_keyfile,
    )


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
        return socket.create_server((address, listen.port), family=family, backlog=128)
    except OSError as error:
        host, port = ("serve.health_host", "serve.health_port") if listen.health else ("serve.host", "serve.port")
        off = f"leave {port} unset" if listen.health else "set serve.enabled: false"
        advice = {
            errno.EADDRINUSE: f"stop what uses it (another streamlearn?) or set {port}; 0 takes a free port",
            errno.EACCES: f"set {port} above 1023; 0 takes a free port",
            errno.EADDRNOTAVAIL: f"set {host} to an address of this machine",
        }.get(error.errno or 0, f"set {host} and {port}, or {off}")
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"serve: {listen.host}:{listen.port} cannot be bound: {reason}; {advice}") from error
