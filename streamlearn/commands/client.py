"""HTTP requests to the daemon that runs with a configuration, from another process."""

import ssl
import urllib.error
import urllib.request
from typing import Any

from streamlearn.errors import SourceError, UsageError
from streamlearn.http.token import read, token_path
from streamlearn.settings import Settings

TIMEOUT_S = 600.0  # the server ends any job that takes longer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token must not leave the daemon's address."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse; urllib then reports the redirect as the answer."""


def _opener(trusted: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Connects directly: a proxy named in the environment must not receive the token."""
    no_proxy = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(no_proxy, _NoRedirects(), urllib.request.HTTPSHandler(context=trusted))


def request(settings: Settings, path: str, body: bytes | None = None, *, advice: str = "start it") -> bytes:
    """GET `path`, or POST a JSON `body`, and return the response body; `advice` is what to do if no daemon answers.

    Raises:
        SourceError: no daemon answers.
        UsageError: the daemon refuses the request (carries its message), or the configuration names no port.
        ConfigError: the daemon requires its token, and the token cannot be read.
    """
    serve = settings.serve
    if serve.port == 0:
        raise UsageError("serve.port is 0, so the daemon's port is not known: set it to the port in the daemon's log")
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    url = f"{'https' if serve.tls_certfile else 'http'}://{host}:{serve.port}{path}"
    headers = {"Content-Type": "application/json"}
    if serve.require_token or serve.open_to_others:
        headers["Authorization"] = f"Bearer {read(token_path(settings))}"
    wanted = urllib.request.Request(url, body, headers)  # noqa: S310 - the scheme is one of the two above
    trusted = ssl.create_default_context(cafile=serve.tls_certfile) if serve.tls_certfile else None
    try:
        with _opener(trusted).open(wanted, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        raise UsageError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise SourceError(f"{url}: no daemon answers ({error}): {advice}") from error
