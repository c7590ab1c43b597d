"""Kafka clients built from `KafkaSettings`, and kafka-python's exceptions translated to messages that say what to do.

kafka-python reports a wrong password, a wrong protocol and an unreachable broker with the same message. A broker must
therefore accept a plain TCP connection before a client is built. A constructor that fails leaves a thread and sockets
behind, which are released here.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError, TopicAuthorizationFailedError, UnsupportedCodecError
from kafka.net.compat import KafkaNetClient
from kafka.structs import TopicPartition as KafkaTopicPartition

from connectors.kafka import batches, codecs
from connectors.kafka.security import secure_options
from streamlearn.errors import SourceError
from streamlearn.settings import KafkaSettings
from streamlearn.stream.position import TopicPartition

_UNSPECIFIC = ("socket disconnected", "timed out", "Unable to bootstrap")
"""What kafka-python reports when it does not know the cause. It also does so when a broker's reason arrives together
with the end of the connection, because it then drops the reason."""

_ADVICE = (
    (
        "SaslAuthenticationFailed",
        "the broker must accept the user and password, the token or the ticket of sasl.mechanism",
    ),
    ("TokenError", "sasl.oauthbearer.* must name an endpoint and a client that it knows, or a token file"),
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
_NO_ADVICE = "a wrong security.protocol, sasl.mechanism, user name, password or token can cause this: check them first"


def explain_failures(failures: Sequence[str]) -> str:
    """Return the most specific reason for which connections failed, and what to do about it."""
    specific = [failure for failure in failures if not any(text in failure for text in _UNSPECIFIC)]
    reason = (specific or failures)[0]
    advice = next((advice for text, advice in _ADVICE if text in reason), _NO_ADVICE)
    return f"{reason}; {advice}"


CLIENT_ERRORS = (KafkaError, OSError)
"""What any call of a client may raise while the cluster is unreachable."""

_TCP_TIMEOUT_S = 1.0
_BACKOFF_MIN_S = 0.1
_BACKOFF_MAX_S = 2.0
_CLOSE_TIMEOUT_MS = 5_000
_ADMIN_TIMEOUT_MS = 10_000  # training waits for an offset commit
_MAX_REQUEST_BYTES = 64 << 20  # the topic's own max.message.bytes decides, not the client
_HEADROOM_BYTES = 8 << 20  # one record batch may exceed fetch.max.bytes by this much and is still delivered

_CLIENT_LOG = logging.getLogger("kafka")
_CLIENT_LOG.addHandler(logging.NullHandler())  # otherwise each failed attempt prints four lines; our events log it once
_CLIENT_LOG.propagate = False


def new_consumer(settings: KafkaSettings, bootstrap_s: float, **options: Any) -> Any:
    """Build a consumer of raw bytes without a group: it needs no coordinator, and no other positions exist.

    Raises:
        SourceError: no broker answered within `bootstrap_s`.
    """
    codecs.limit_decompression(settings.max_decompressed_bytes)
    return _new(
        KafkaConsumer,
        settings,
        bootstrap_s,
        **{
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": settings.isolation_level,
            "allow_auto_create_topics": False,
            "max_poll_records": settings.max_poll_records,
            "max_partition_fetch_bytes": settings.max_partition_fetch_bytes,
            "fetch_max_bytes": settings.fetch_max_bytes,
            "receive_message_max_bytes": max_response_bytes(settings),
            **options,
        },
    )


def max_response_bytes(settings: KafkaSettings) -> int:
    """The largest answer that a consumer accepts. It drops the connection at a larger one, and only logs that."""
    return settings.fetch_max_bytes + max(_HEADROOM_BYTES, settings.max_partition_fetch_bytes)


def new_producer(settings: KafkaSettings, bootstrap_s: float, **options: Any) -> Any:
    """Build an idempotent producer of raw bytes that waits for every in-sync replica.

    Raises:
        SourceError: no broker answered within `bootstrap_s`.
    """
    return _new(
        KafkaProducer,
        settings,
        bootstrap_s,
        **{
            "acks": "all",
            "enable_idempotence": True,
            "allow_auto_create_topics": False,
            "max_block_ms": settings.request_timeout_ms,
            "delivery_timeout_ms": 2 * settings.request_timeout_ms,
            "max_request_size": _MAX_REQUEST_BYTES,
            **options,
        },
    )


def new_admin(settings: KafkaSettings, bootstrap_s: float) -> Any:
    """Build an admin client, for topic descriptions and offset commits.

    Raises:
        SourceError: no broker answered within `bootstrap_s`.
    """
    timeout_ms = min(settings.request_timeout_ms, _ADMIN_TIMEOUT_MS)
    return _new(KafkaAdminClient, settings, bootstrap_s, request_timeout_ms=timeout_ms)


def close_quietly(client: Any) -> None:
    """Close a client and ignore errors, which have no consequence at this point."""
    with contextlib.suppress(*CLIENT_ERRORS, RuntimeError):
        if isinstance(client, KafkaConsumer):
            client.close(autocommit=False, timeout_ms=_CLOSE_TIMEOUT_MS)
        else:
            client.close()


def is_reachable(settings: KafkaSettings) -> bool:
    """Return whether any bootstrap server accepts a TCP connection; blocks at most a second for each."""
    for server in settings.bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TCP_TIMEOUT_S).close()
            return True
    return False


def wait_until_reachable(
    settings: KafkaSettings,
    timeout_s: float,
    *,
    on_wait: Callable[[], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return once a bootstrap server accepts connections. Retries with growing pauses, and calls `on_wait` first.

    Raises:
        SourceError: none accepted a connection within `timeout_s`.
    """
    deadline = clock() + timeout_s
    pause_s = _BACKOFF_MIN_S
    while not is_reachable(settings):
        if pause_s == _BACKOFF_MIN_S:
            on_wait()
        if clock() + pause_s > deadline:
            raise SourceError(
                f"a Kafka broker must be reachable at {settings.bootstrap_servers}, none accepted a connection for "
                f"{timeout_s:.0f} s. Start the broker, or correct bootstrap.servers"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, _BACKOFF_MAX_S)


def describe(error: BaseException) -> str:
    """Return the error in one line, with what to do if that is known."""
    text = str(error) or type(error).__name__
    if isinstance(error, TopicAuthorizationFailedError):
        return (
            f"{text}: grant the user READ and DESCRIBE on the source topics, and READ, WRITE and DESCRIBE on the "
            "dead-letter topic"
        )
    if isinstance(error, UnsupportedCodecError):
        return f"{text}: the topic is compressed; run pip install 'streamlearn[codecs]'"
    return text


def to_kafka(origin: TopicPartition) -> Any:
    return KafkaTopicPartition(origin.topic, origin.partition)


def _new(client: Any, settings: KafkaSettings, bootstrap_s: float, **options: Any) -> Any:
    batches.install()
    connection = _connection(settings)
    with _connection_failures() as failures:
        try:
            return _build(client, bootstrap_timeout_ms=int(bootstrap_s * 1000), **{**connection, **options})
        except CLIENT_ERRORS as error:
            raise SourceError(
                f"{settings.bootstrap_servers} accepts TCP connections but no {settings.security_protocol} connection "
                f"succeeded for {bootstrap_s:.0f} s: {explain_failures(failures or [describe(error)])}"
            ) from error


def _build(client: Any, **options: Any) -> Any:
    """Call the constructor; if it fails, end the I/O thread that it started and close its sockets."""
    connections: list[KafkaNetClient] = []

    def connect(**configs: Any) -> KafkaNetClient:
        connections.append(KafkaNetClient(**configs))
        return connections[-1]

    try:
        return client(kafka_client=connect, **options)
    except BaseException:
        for connection in connections:
            close_quietly(connection)
        raise


def _connection(settings: KafkaSettings) -> dict[str, Any]:
    """Address, credentials and encryption, shared by every client."""
    return {
        "bootstrap_servers": [server.strip() for server in settings.bootstrap_servers.split(",")],
        "client_id": settings.client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": settings.metadata_max_age_ms,
        "reconnect_backoff_max_ms": int(_BACKOFF_MAX_S * 1000),
        **secure_options(settings),
    }


@contextlib.contextmanager
def _connection_failures() -> Iterator[list[str]]:
    """Collect the reasons of failed connections, in order. kafka-python only logs them."""
    failures: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Bootstrap") and " failed: " in message:
                failures.append(message.partition(" failed: ")[2].partition(" (backoff")[0])

    listener = Listener(logging.WARNING)
    _CLIENT_LOG.addHandler(listener)
    try:
        yield failures
    finally:
        _CLIENT_LOG.removeHandler(listener)
