"""The HTTP server: uvicorn in a thread of its own with an event loop of its own."""

import errno
import logging
import os
import socket
import threading

import uvicorn
from fastapi import FastAPI

from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.serve.connection import GuardedConnection
from streamlearn.settings import ServeSettings

STOP_TIMEOUT_S = 6.0  # uvicorn's graceful 5 s, and one to notice

_log = get_logger("serve")


class HttpServer:
    """Serves an application from `start` to `stop`; both may be called again."""

    def __init__(self, app: FastAPI, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._port = settings.port

    @property
    def port(self) -> int:
        """The port that is bound, which `serve.port` 0 leaves open until `start`."""
        return self._port

    def start(self) -> None:
        """Bind, then serve in the background. Connections are accepted when it returns; does nothing while it runs.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if self._thread is not None:
            return
        listener = _bind(self._settings.host, self._settings.port)
        self._port = listener.getsockname()[1]
        server = self._server = uvicorn.Server(_config(self._app, self._settings))
        self._thread = threading.Thread(target=_serve, args=(server, listener), name="streamlearn-http", daemon=True)
        self._thread.start()
        _log.info(Event.HTTP_STARTED, host=self._settings.host, port=self._port)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Accept nothing more, let requests in flight finish, end the thread. Safe to call twice.

        Close the job queue first: requests that wait for a job end then.
        """
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True  # drops what is in flight
            self._thread.join(1.0)
        self._server = self._thread = None


class _ForwardToEvents(logging.Handler):
    """uvicorn's own errors, a handler's traceback among them, as events."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.error(Event.HTTP_FAILED, message=record.getMessage().strip(), exc_info=record.exc_info)


_forward = _ForwardToEvents()


def _config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """What a connection may do belongs here; what a request must satisfy, in guards."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(_forward)  # adds it once
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
        ssl_certfile=settings.tls_certfile,
        ssl_keyfile=settings.tls_keyfile,
    )


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        server.run(sockets=[listener])
    except Exception:  # noqa: BLE001 - training goes on without HTTP, whatever ended it
        _log.exception(Event.HTTP_FAILED)
    finally:
        listener.close()


def _bind(host: str, port: int) -> socket.socket:
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        number = error.errno or 0
        advice = {
            errno.EADDRINUSE: "stop what has it (another streamlearn?) or set serve.port; 0 takes a free one",
            errno.EACCES: "set serve.port above 1023; 0 takes a free one",
            errno.EADDRNOTAVAIL: "set serve.host to 127.0.0.1",
        }.get(number, "set serve.host and serve.port, or serve.enabled: false")
        raise ConfigError(f"serve: {host}:{port} cannot be bound: {os.strerror(number)}; {advice}") from error
