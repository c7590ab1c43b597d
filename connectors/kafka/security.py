"""Who we are to a broker and how we know it: credentials, certificates, and what to do when they are refused."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamlearn.errors import CredentialsError
from streamlearn.settings import KafkaSettings

_SAYS_NOTHING = ("socket disconnected", "timed out", "Unable to bootstrap")
"""What a client reports when it does not know why. It does so too when a broker's reason and its end of the connection
arrive together: kafka-python drops what was read with the end."""

_ADVICE = (
    ("SaslAuthenticationFailed", "sasl.plain.username and the password must be those of a user of the broker"),
    ("UnsupportedSaslMechanism", "sasl.mechanism must be one that the broker offers"),
    ("mismatch", "bootstrap.servers must name the broker as its certificate does, and so must advertised.listeners"),
    ("CERTIFICATE_VERIFY_FAILED", "ssl.cafile must hold the authority that signed the broker's certificate"),
    ("_ALERT_", "ssl.certfile and ssl.keyfile must be a certificate of ours that the broker trusts"),
)
"""What a cause says -> what to look at; the first that fits."""
_NO_ADVICE = "a wrong security.protocol, sasl.mechanism, user or password can look like this: check them first"


def secure_options(settings: KafkaSettings) -> dict[str, Any]:
    """What a client is told of protocol, encryption and identity.

    Raises:
        CredentialsError: a certificate, a key or the password's file cannot be used.
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


def refusal(failures: Sequence[str]) -> str:
    """Of why connections failed, what tells most, and what to do about it."""
    telling = [failure for failure in failures if not any(words in failure for words in _SAYS_NOTHING)]
    cause = (telling or failures)[0]
    advice = next((what for words, what in _ADVICE if words in cause), _NO_ADVICE)
    return f"{cause}; {advice}"


def _context(settings: KafkaSettings) -> ssl.SSLContext:
    """TLS 1.2 or newer; the broker's certificate must be trusted and for the name that it was asked by."""
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(
            f"ssl.cafile must be a PEM file of authorities: {settings.ssl_cafile}: {error}"
        ) from error
    if settings.ssl_certfile is not None:
        _identify(context, settings.ssl_certfile, settings.ssl_keyfile)
    return context


def _identify(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key, password="")  # else an encrypted key is asked for on the terminal
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(
            "ssl.certfile and ssl.keyfile must be a PEM certificate and its own PEM key, not encrypted: "
            f"{certificate}, {key or 'no key beside it'}: {error}"
        ) from error


def _password(settings: KafkaSettings) -> str:
    """The password, or the first line of its file."""
    if settings.sasl_plain_password is not None:
        return settings.sasl_plain_password.get_secret_value()
    path = settings.sasl_plain_password_file
    assert path is not None, "settings refuse SASL without a password"
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"sasl.plain.password.file must be a readable text file: {path}: {error}") from error
