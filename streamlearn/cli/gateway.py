"""The gateway command: one process with its HTTP endpoint, and an orderly end."""

import threading
from typing import Any

from pydantic import ValidationError

from streamlearn.cli.streams import failures_as_events
from streamlearn.daemon.process import StopSignals
from streamlearn.errors import StreamlearnError, UsageError
from streamlearn.events import Event, configure_logging, get_logger
from streamlearn.gateway.app import MAX_CONNECTIONS, create_app
from streamlearn.http.guards import read_token
from streamlearn.http.server import HttpServer, Listener
from streamlearn.http.tracing import configure_tracing
from streamlearn.settings import GatewaySettings
from streamlearn.settings.faults import explain

CHECK_S = 1.0
"""How often the main thread checks that the server still runs."""

_log = get_logger("gateway")


def gateway_settings(**options: Any) -> GatewaySettings:
    """The options of the command, checked; a token file means that the token is required.

    Raises:
        UsageError: they cannot work together.
    """
    try:
        return GatewaySettings(require_token=options.get("token_file") is not None, **options)
    except ValidationError as error:
        raise UsageError("; ".join(explain(error, GatewaySettings))) from None  # it quotes what was found


def run_gateway(settings: GatewaySettings, signals: StopSignals) -> None:
    """Serve until one of `signals`, which must be installed, arrives; then finish the requests in flight.

    Raises:
        ConfigError: a token cannot be read, the address cannot be bound, or no client of the object store is installed.
        StreamlearnError: the server ended by itself.
    """
    with failures_as_events(_log, Event.GATEWAY_FAILED, as_json=configure_logging("info")):
        _serve(settings, signals)


def _serve(settings: GatewaySettings, signals: StopSignals) -> None:
    configure_tracing("streamlearn-gateway")
    stopping = threading.Event()

    def stop(signal: str) -> None:
        _log.info(Event.STOP_REQUESTED, signal=signal)
        stopping.set()

    token = read_token(settings.token_file) if settings.token_file is not None else ""
    upstream_token = read_token(settings.upstream_token_file) if settings.upstream_token_file is not None else ""
    app = create_app(settings, token=token, upstream_token=upstream_token)
    listener = Listener.for_requests(settings)
    server = HttpServer(app, listener, max_connections=MAX_CONNECTIONS, grace_s=settings.stop_timeout_s)
    signals.call_on_signal(stop)
    with server:
        upstreams = [*settings.upstreams, *filter(None, [settings.upstream_dns])]
        _log.info(Event.GATEWAY_STARTED, published=str(settings.published), upstreams=upstreams)
        while not stopping.wait(CHECK_S):
            if not server.is_running:
                raise StreamlearnError("the HTTP server of the gateway ended by itself; see the log")
    _log.info(Event.GATEWAY_STOPPED)
