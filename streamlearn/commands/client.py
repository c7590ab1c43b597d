"""HTTP requests to the daemon that runs with a configuration, from another process."""

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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


@dataclass(frozen=True)
class Endpoint:
    """A daemon's address, and what it asks of its clients."""

    url: str
    """Scheme, host and port."""
    token: str | None = None
    certificate: Path | None = None
    """The daemon's certificate chain; None for those that the system trusts."""

    @classmethod
    def of(cls, settings: Settings, *, with_token: bool = False) -> Self:
        """The daemon that runs with a configuration; `with_token`: the token is needed in any case.

        Raises:
            UsageError: the configuration names no port.
            ConfigError: the daemon requires its token, and the token cannot be read.
        """
        serve = settings.serve
        if serve.port == 0:
            raise UsageError(
                "serve.port is 0, so the daemon's port is not known: set it to the port in the daemon's log"
            )
        host = f"[{serve.host}]" if ":" in serve.host else serve.host
        url = f"{'https' if serve.tls_certfile else 'http'}://{host}:{serve.port}"
        is_needed = with_token or serve.require_token or serve.open_to_others
        return cls(url, read(token_path(settings)) if is_needed else None, serve.tls_certfile)

    def request(
        self,
        path: str,
        body: bytes | None = None,
        *,
        advice: str = "start it",
        agent: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """GET `path`, or POST a JSON `body`, and return the response body; see `request`."""
        headers = {"Content-Type": "application/json"}
        if agent is not None:
            headers["User-Agent"] = agent
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        url = self.url + path
        wanted = urllib.request.Request(url, body, headers)  # noqa: S310 - callers give http and https only
        trusted = ssl.create_default_context(cafile=self.certificate) if self.url.startswith("https:") else None
        try:
            with _opener(trusted).open(wanted, timeout=timeout_s) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise UsageError(f"{url} answered {error.code}: {_message(error.read())}") from error
        except OSError as error:
            raise SourceError(f"{url}: no daemon answers ({error}): {advice}") from error


def request(
    settings: Settings,
    path: str,
    body: bytes | None = None,
    *,
    advice: str = "start it",
    with_token: bool = False,
    agent: str | None = None,
) -> bytes:
    """GET `path`, or POST a JSON `body`, and return the response body.

    Args:
        settings: The daemon's configuration.
        path: Path of the endpoint.
        body: JSON to post.
        advice: What to do if no daemon answers.
        with_token: Whether the endpoint always needs the token.
        agent: What this client calls itself.

    Raises:
        SourceError: no daemon answers.
        UsageError: the daemon refuses the request (carries its message), or the configuration names no port.
        ConfigError: the daemon requires its token, and the token cannot be read.
    """
    return Endpoint.of(settings, with_token=with_token).request(path, body, advice=advice, agent=agent)


def _message(body: bytes) -> str:
    """Message and hint of an error in the daemon's format; anything else as it is."""
    try:
        error = json.loads(body)["error"]
        return f"{error['message']} ({error['hint']})" if error["hint"] else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
