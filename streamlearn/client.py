"""Asking the daemon that runs under a configuration, from another process."""

import ssl
import urllib.error
import urllib.request

from streamlearn.errors import SourceError, UsageError
from streamlearn.serve.token import read, token_path
from streamlearn.settings import Settings

TIMEOUT_S = 600.0  # the server ends a job that takes longer


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
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise UsageError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise SourceError(f"{url}: no daemon answers ({error}): {otherwise}") from error
