"""Asking the daemon that runs under a configuration, from another process."""

import ssl
import urllib.error
import urllib.request
from typing import Any

from streamlearn.errors import SourceError, UsageError
from streamlearn.serve.token import read, token_path
from streamlearn.settings import Settings

TIMEOUT_S = 600.0  # the server ends a job that takes longer


class _Still(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else with the token."""

    def redirect_request(self, *_: Any) -> None:
        """No."""


def _opener(trusted: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Straight to the daemon: a proxy of the environment must not see the token."""
    direct = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(direct, _Still(), urllib.request.HTTPSHandler(context=trusted))


def ask(settings: Settings, path: str, body: bytes | None = None, *, otherwise: str = "start it") -> bytes:
    """GET `path`, or POST a JSON `body`, and return the answer; `otherwise` is what to do when there is no daemon.

    Raises:
        SourceError: it does not answer.
        UsageError: it refuses the request, which carries its message; or the configuration names no port.
        ConfigError: it needs its token, which cannot be read.
    """
    serve = settings.serve
    if serve.port == 0:
        raise UsageError("serve.port is 0, so any port may be the daemon's: set it to the one that its log names")
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    url = f"{'https' if serve.tls_certfile else 'http'}://{host}:{serve.port}{path}"
    headers = {"Content-Type": "application/json"}
    if serve.require_token or serve.open_to_others:
        headers["Authorization"] = f"Bearer {read(token_path(settings))}"
    request = urllib.request.Request(url, body, headers)  # noqa: S310
    trusted = ssl.create_default_context(cafile=serve.tls_certfile) if serve.tls_certfile else None
    try:
        with _opener(trusted).open(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise UsageError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise SourceError(f"{url}: no daemon answers ({error}): {otherwise}") from error
