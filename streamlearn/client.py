"""Asking the daemon that runs under a configuration, from another process."""

import urllib.error
import urllib.request

from streamlearn.errors import SourceError, UsageError
from streamlearn.settings import ServeSettings

TIMEOUT_S = 600.0  # the server ends a job that takes longer


def ask(serve: ServeSettings, path: str, body: bytes | None = None, *, otherwise: str = "start it") -> bytes:
    """GET `path`, or POST a JSON `body`, and return the answer; `otherwise` is what to do when there is no daemon.

    Raises:
        SourceError: it does not answer.
        UsageError: it refuses the request, which carries its message; or the configuration names no port.
    """
    if serve.port == 0:
        raise UsageError("serve.port is 0, so any port may be the daemon's: set it to the one that its log names")
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    url = f"http://{host}:{serve.port}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise UsageError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise SourceError(f"{url}: no daemon answers ({error}): {otherwise}") from error
