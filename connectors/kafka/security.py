"""Encryption and credentials of Kafka clients: TLS, passwords, OAuth tokens, AWS credentials, Kerberos tickets.

kafka-python speaks the protocols of SASL; here it gets what they need. An OAuth token lives for minutes: a client asks
for one when it connects, and again before the broker's session ends with the token (KIP-368).
"""

import importlib
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafka.errors import KafkaError
from kafka.net.sasl.oauth import AbstractTokenProvider

from streamlearn.errors import ConfigError, CredentialsError, without_credentials
from streamlearn.secret_files import check_secret_file, read_secret
from streamlearn.settings import KafkaSettings
from streamlearn.settings.section import shown_server

if TYPE_CHECKING:
    import httpx2

_ENDPOINT_TIMEOUT_S = 10.0
_USABLE = 0.8  # of a token's lifetime, as in Kafka's own clients: the rest covers clocks that differ and slow answers
_MAX_SHOWN = 200


class TokenError(KafkaError):  # type: ignore[misc]  # kafka-python ships no types
    """There is no token. The client closes the connection and tries again."""


def secure_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return a client's options for protocol, encryption and credentials.

    Raises:
        CredentialsError: a file, a package or a credential that the settings require cannot be used.
    """
    options: dict[str, Any] = {"security_protocol": settings.security_protocol}
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = _context(settings)
    if settings.security_protocol.startswith("SASL"):
        options |= _sasl_options(settings)
    return options


def _sasl_options(settings: KafkaSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"sasl_mechanism": settings.sasl_mechanism}
    match settings.sasl_mechanism:
        case "OAUTHBEARER":
            return options | {"sasl_oauth_token_provider": OAuthTokens(settings)}
        case "AWS_MSK_IAM":
            _check_aws_credentials()
            return options
        case "GSSAPI":
            _check_kerberos()
            return options | {
                "sasl_kerberos_service_name": settings.sasl_kerberos_service_name,
                "sasl_kerberos_domain_name": settings.sasl_kerberos_domain_name,
            }
        case _:
            return options | {
                "sasl_plain_username": settings.sasl_plain_username,
                "sasl_plain_password": _password(settings),
            }


def _context(settings: KafkaSettings) -> ssl.SSLContext:
    """TLS 1.2 or newer; the broker's certificate must be trusted and match the host name."""
    context = _trusting(settings.ssl_cafile, "ssl.cafile")
    if settings.ssl_certfile is not None:
        _load_client_certificate(context, settings.ssl_certfile, settings.ssl_keyfile)
    return context


def _trusting(cafile: Path | None, setting: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile)
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(f"{setting} must be a PEM file of CA certificates: {cafile}: {error}") from error


def _load_client_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        if key is not None:
            check_secret_file(key)
        context.load_cert_chain(certificate, key, password="")  # otherwise OpenSSL prompts for an encrypted key
    except ConfigError as error:
        raise CredentialsError(f"ssl.keyfile: {error}") from error
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(
            "ssl.certfile and ssl.keyfile must be a PEM certificate and its unencrypted PEM key: "
            f"{certificate}, {key or 'no ssl.keyfile'}: {error}"
        ) from error


class OAuthTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Access tokens of one client: from a file, or from an endpoint (client credentials, RFC 6749 section 4.4)."""

    def __init__(self, settings: KafkaSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Check what can be checked without a request.

        Raises:
            CredentialsError: the CA file or the file with the secret or the token cannot be used.
        """
        super().__init__()
        self._settings = settings
        self._clock = clock
        self._token = ""
        self._usable_until = 0.0
        self._context = _trusting(settings.sasl_oauthbearer_cafile, "sasl.oauthbearer.cafile")
        self._read_secret()

    def token(self) -> str:
        """Return a token with at least a fifth of its lifetime left; blocks for a request if there is none.

        Raises:
            TokenError: the endpoint does not answer with a token, or the file cannot be read.
        """
        try:
            if self._settings.sasl_oauthbearer_token_file is not None:
                return self._read_secret()
            if self._clock() >= self._usable_until:
                self._request()
            return self._token
        except CredentialsError as error:
            raise TokenError(str(error)) from error

    def extensions(self) -> dict[str, str]:
        return dict(self._settings.sasl_oauthbearer_extensions or {})

    def _read_secret(self) -> str:
        settings = self._settings
        token, secret = settings.sasl_oauthbearer_token_file, settings.sasl_oauthbearer_client_secret_file
        if token is not None:
            return _secret(token, "sasl.oauthbearer.token.file")
        assert secret is not None, "the settings refuse an endpoint without a secret"
        return _secret(secret, "sasl.oauthbearer.client.secret.file")

    def _request(self) -> None:
        settings, started = self._settings, self._clock()
        url, client = settings.sasl_oauthbearer_token_endpoint_url, settings.sasl_oauthbearer_client_id
        assert url is not None, "the settings require it without a token file"
        assert client is not None, "the settings require it with an endpoint"
        import httpx2  # noqa: PLC0415 - other mechanisms do not need it

        scope = {} if settings.sasl_oauthbearer_scope is None else {"scope": settings.sasl_oauthbearer_scope}
        try:
            answer = httpx2.post(  # through the proxy of HTTPS_PROXY, if there is one
                url,
                data={"grant_type": "client_credentials", **scope},
                auth=(client, self._read_secret()),
                verify=self._context,
                timeout=_ENDPOINT_TIMEOUT_S,
            )
        except httpx2.HTTPError as error:
            found = without_credentials(f"{url} must answer, found {type(error).__name__}: {error}")
            raise TokenError(f"the token endpoint {found}") from error
        try:
            content = answer.json() if answer.status_code == 200 else {}
            token, lifetime_s = str(content["access_token"]), float(content.get("expires_in", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TokenError(
                f"the token endpoint {shown_server(url)} must return an access_token, found status "
                f"{answer.status_code} and {_refusal(answer)}: check sasl.oauthbearer.client.id, its secret and "
                "sasl.oauthbearer.scope"
            ) from None
        self._token, self._usable_until = token, started + _USABLE * lifetime_s


def _secret(path: Path, setting: str) -> str:
    """Return the first line of a file with a secret.

    Raises:
        CredentialsError: it cannot be read, or others may read it.
    """
    try:
        return read_secret(path)
    except ConfigError as error:
        raise CredentialsError(f"{setting}: {error}") from error


def _password(settings: KafkaSettings) -> str:
    """The password, or the first line of its file."""
    if settings.sasl_plain_password is not None:
        return settings.sasl_plain_password.get_secret_value()
    path = settings.sasl_plain_password_file
    assert path is not None, "the settings refuse SASL without a password"
    return _secret(path, "sasl.plain.password.file")


def _refusal(answer: "httpx2.Response") -> str:
    """What an endpoint says about a refusal (RFC 6749 section 5.2); never a token."""
    try:
        content = answer.json()
        return " ".join(str(content[key])[:_MAX_SHOWN] for key in ("error", "error_description") if key in content)
    except (ValueError, TypeError):
        return "no JSON"


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        raise CredentialsError(
            f"sasl.mechanism needs the package {name}, found {error}: run pip install 'streamlearn[{extra}]'"
        ) from error


def _check_aws_credentials() -> None:
    """Check what kafka-python needs of the AWS environment; it signs each connection with what is valid then."""
    session = _package("botocore.session", "msk").Session()
    if session.get_credentials() is None:
        raise CredentialsError(
            "AWS_MSK_IAM needs AWS credentials, found none: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile "
            "(AWS_PROFILE), a web identity (AWS_WEB_IDENTITY_TOKEN_FILE), or run where an instance or task role applies"
        )
    if not session.get_config_variable("region"):
        raise CredentialsError("AWS_MSK_IAM needs the region of the cluster, found none: set AWS_DEFAULT_REGION")


def _check_kerberos() -> None:
    """Check that there is a ticket or a keytab to get one with; kafka-python reports neither."""
    gssapi = _package("gssapi", "kerberos")
    try:
        gssapi.Credentials(usage="initiate")
    except gssapi.exceptions.GSSError as error:
        raise CredentialsError(
            f"GSSAPI needs a Kerberos ticket, found {error}: run kinit, or set KRB5_CLIENT_KTNAME to a keytab"
        ) from error
