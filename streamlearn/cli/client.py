"""HTTP requests to the daemon that runs with a configuration, from another process."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import httpx2
from pydantic import ValidationError

from streamlearn.errors import ConfigError, SourceError, UsageError
from streamlearn.http.guards import read_token, token_path
from streamlearn.settings import Settings

TIMEOUT_S = 600.0  # the server ends any job that takes longer
_END = "-----END CERTIFICATE-----"
_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""What TLS raises where plain TCP raises ConnectionResetError."""


def daemon_url(settings: Settings) -> str:
    """Scheme, host and port of the daemon that runs with a configuration.

    Raises:
        UsageError: the configuration names no port.
    """
    serve = settings.serve
    if serve.port == 0:
        raise UsageError("serve.port is 0, so the daemon's port is not known: set it to the port in the daemon's log")
    return f"{'https' if serve.tls_certfile else 'http'}://{_reachable(serve.host)}:{serve.port}"


def request(
    settings: Settings,
    path: str,
    body: bytes | None = None,
    *,
    advice: str = "start it",
    with_token: bool = False,
    agent: str = "streamlearn",
) -> bytes:
    """GET `path` of the daemon that runs with a configuration, or POST a JSON `body`; return the response body.

    Redirects are not followed and no proxy is used: the token must not leave the daemon's address.

    Args:
        settings: The daemon's configuration.
        path: Path of the endpoint.
        body: JSON to post.
        advice: What to do if no daemon answers.
        with_token: Whether the endpoint always needs the token.
        agent: What this client calls itself.

    Raises:
        SourceError: no daemon answers.
        UsageError: the daemon refuses the request (carries its message), or has another certificate; or the
            configuration names no port.
        ConfigError: the daemon requires its token, which cannot be read; or its certificate cannot be read.
    """
    serve, url = settings.serve, daemon_url(settings) + path
    headers = {"content-type": "application/json", "user-agent": agent}
    if with_token or serve.require_token or serve.open_to_others:
        headers["authorization"] = f"Bearer {read_token(token_path(settings))}"
    trusted = _pinned(serve.tls_certfile) if serve.tls_certfile else False  # plain HTTP
    try:
        with httpx2.Client(verify=trusted, trust_env=False, timeout=TIMEOUT_S) as client:
            response = client.request("GET" if body is None else "POST", url, content=body, headers=headers)
    except httpx2.HTTPError as error:
        tls_error = _tls_error(error)
        if tls_error is None:
            raise SourceError(f"{url}: no daemon answers ({error or type(error).__name__}): {advice}") from error
        found = getattr(tls_error, "verify_message", tls_error)
        raise UsageError(
            f"{url}: expected the first certificate in serve.tls_certfile {serve.tls_certfile}, found: {found}; "
            "restart the daemon if the setting or the file changed after its start, renew an expired certificate"
        ) from error
    if not response.is_success:
        raise UsageError(f"{url} answered {response.status_code}: {_message(response)}")
    return response.content


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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        first, end, _ = file.read_text(encoding="ascii", errors="replace").partition(_END)
        context.load_verify_locations(cadata=first[first.find("-----BEGIN CERTIFICATE-----") :] + end)
    except (OSError, ValueError) as error:
        raise ConfigError(f"serve.tls_certfile {file}: expected a PEM certificate chain, found: {error}") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # nothing else is trusted, so a name would prove nothing more
    return context


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that caused another, unless it is the end of the connection."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return None if isinstance(error, _ENDED) else error
        error = error.__cause__ or error.__context__
    return None


def _message(response: httpx2.Response) -> str:
    """Message and hint of an error in the daemon's format; anything else as it is."""
    try:
        error = response.json()["error"]
        return f"{error['message']} ({error['hint']})" if error["hint"] else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return response.text


@contextmanager
def checked_response(who: str) -> Iterator[None]:
    """Around the reading of a response: its JSON, and the values that a view expects of it.

    Raises:
        UsageError: it is not the response of a daemon of this release; says what differs first.
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
