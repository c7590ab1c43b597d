"""HTTP requests to the daemon that runs with a configuration, from another process."""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from streamlearn.errors import ConfigError, SourceError, StreamlearnError, UsageError
from streamlearn.http.guards import read, token_path
from streamlearn.settings import Settings

TIMEOUT_S = 600.0  # the server ends any job that takes longer
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""What TLS raises where plain TCP raises ConnectionResetError."""


class _AnyAnswer(urllib.request.HTTPErrorProcessor):
    """Returns refusals and redirects too. None is followed: the token must not leave the daemon's address."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        """The response as it is."""
        del request
        return response

    https_response = http_response


def _opener(trusted: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Connects directly: a proxy named in the environment must not receive the token."""
    no_proxy = urllib.request.ProxyHandler({})
    return urllib.request.build_opener(no_proxy, _AnyAnswer(), urllib.request.HTTPSHandler(context=trusted))


@dataclass(frozen=True)
class Endpoint:
    """A daemon's address, and what it asks of its clients."""

    url: str
    """Scheme, host and port."""
    token: str | None = None
    certificate: Path | None = None
    """PEM file whose first certificate is the daemon's, and alone is trusted; None for those that the system trusts."""

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
        url = f"{'https' if serve.tls_certfile else 'http'}://{_reachable(serve.host)}:{serve.port}"
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
        opener = _opener(self._trusted())
        try:
            with opener.open(wanted, timeout=timeout_s) as response:
                status: int = response.status
                content: bytes = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._fault(url, error, advice) from error
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            raise UsageError(f"{url} answered {status}: {_message(content)}")
        return content

    def _trusted(self) -> ssl.SSLContext | None:
        """What TLS trusts; None over plain HTTP."""
        if not self.url.startswith("https:"):
            return None
        return ssl.create_default_context() if self.certificate is None else _pinned(self.certificate)

    def _fault(self, url: str, error: Exception, advice: str) -> StreamlearnError:
        """What to raise when no answer came."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if not isinstance(cause, ssl.SSLError) or isinstance(cause, _ENDED):
            found = str(error) if isinstance(error, OSError) else f"{error!r:.200}"
            return SourceError(f"{url}: no daemon answers ({found}): {advice}")
        if not isinstance(cause, ssl.SSLCertVerificationError):
            return UsageError(
                f"{url}: what answers there does not speak TLS as expected ({cause}): if the daemon was started "
                "without serve.tls_certfile, restart it"
            )
        found = cause.verify_message
        if self.certificate is None:
            return UsageError(
                f"{url}: expected a certificate that this system trusts, found: {found}; give --config with the "
                "daemon's configuration instead, which names its certificate"
            )
        return UsageError(
            f"{url}: expected the first certificate in serve.tls_certfile {self.certificate}, found: {found}; if it "
            "was replaced after the daemon's start, restart the daemon, and if it has expired, renew it first"
        )


def _reachable(host: str) -> str:
    """Host of the URL at which a daemon that binds `host` is reached.

    >>> _reachable("0.0.0.0"), _reachable("::"), _reachable("10.0.0.5"), _reachable("trainer.lan")
    ('127.0.0.1', '[::1]', '10.0.0.5', 'trainer.lan')
    """
    host = host.strip("[]")
    try:
        if ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    except ValueError:  # a name
        return host
    return f"[{host}]" if ":" in host else host


def _pinned(file: Path) -> ssl.SSLContext:
    """Trust the daemon's own certificate, whoever signed it, and no other.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    try:
        found = _CERTIFICATE.search(file.read_text(encoding="ascii", errors="replace"))
        if found is None:
            raise ConfigError(f"serve.tls_certfile {file}: expected a PEM certificate chain, found no certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=found[0])
    except OSError as error:
        raise ConfigError(f"serve.tls_certfile {file}: expected a PEM certificate chain, found: {error}") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # nothing else is trusted, so a name would prove nothing more
    return context


@contextmanager
def understood(who: str) -> Iterator[None]:
    """Around the reading of an answer: its JSON, and the values that a view expects of it.

    Raises:
        UsageError: it is not the answer of a daemon of this release; says what differs first.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, (error.title, *first["loc"])))
        raise _foreign(who, f"{where}: {first['msg']}") from error
    except ValueError as error:
        raise _foreign(who, f"no JSON: {error}") from error


def _foreign(who: str, reason: str) -> UsageError:
    return UsageError(
        f"{who} answers, but not as this release's daemon does ({reason}): check the address, and use the release that "
        "the daemon runs"
    )


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
