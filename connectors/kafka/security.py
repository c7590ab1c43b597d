"""Credentials, certificates, and advice for when a broker refuses them."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamlearn.errors import CredentialsError
from streamlearn.settings import KafkaSettings

_UNSPECIFIC = ("socket disconnected", "timed out", "Unable to bootstrap")
"""What kafka-python reports when it does not know the cause. It also does so when a broker's reason arrives together
with the end of the connection, because it then drops the reason."""

_ADVICE = (
    ("SaslAuthenticationFailed", "set sasl.plain.username and the password to those of a user of the broker"),
    ("UnsupportedSaslMechanism", "set sasl.mechanism to one that the broker supports"),
    (
        "mismatch",
        "the broker's certificate must match the host names in bootstrap.servers and in the broker's "
        "advertised.listeners",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "the broker's certificate must be signed by a CA in ssl.cafile"),
    ("_ALERT_", "ssl.certfile and ssl.keyfile must be a client certificate that the broker trusts, and its key"),
)
"""Part of a reason -> what to do; the first match applies."""
_NO_ADVICE = "a wrong security.protocol, sasl.mechanism, user name or password can cause this: check them first"


def secure_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return a client's options for protocol, encryption and credentials.

    Raises:
        CredentialsError: a certificate, a key or the password file cannot be used.
    """
    options: dict[str, Any] = {"security_protocol": settings.security_protocol}
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = _context(settings)
    if settings.security_protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_plain_username,
            "sasl_plain_password": _password(settings),
        }
    return options


def explain_failures(failures: Sequence[str]) -> str:
    """Return the most specific reason for which connections failed, and what to do about it."""
    specific = [failure for failure in failures if not any(text in failure for text in _UNSPECIFIC)]
    reason = (specific or failures)[0]
    advice = next((advice for text, advice in _ADVICE if text in reason), _NO_ADVICE)
    return f"{reason}; {advice}"


def _context(settings: KafkaSettings) -> ssl.SSLContext:
    """TLS 1.2 or newer; the broker's certificate must be trusted and match the host name."""
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(
            f"ssl.cafile must be a PEM file of CA certificates: {settings.ssl_cafile}: {error}"
        ) from error
    if settings.ssl_certfile is not None:
        _load_client_certificate(context, settings.ssl_certfile, settings.ssl_keyfile)
    return context


def _load_client_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key, password="")  # otherwise OpenSSL prompts for an encrypted key
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(
            "ssl.certfile and ssl.keyfile must be a PEM certificate and its unencrypted PEM key: "
            f"{certificate}, {key or 'no ssl.keyfile'}: {error}"
        ) from error


def _password(settings: KafkaSettings) -> str:
    """The password, or the first line of its file."""
    if settings.sasl_plain_password is not None:
        return settings.sasl_plain_password.get_secret_value()
    path = settings.sasl_plain_password_file
    assert path is not None, "the settings refuse SASL without a password"
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"sasl.plain.password.file must be a readable text file: {path}: {error}") from error
