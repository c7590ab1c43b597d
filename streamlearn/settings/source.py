"""Settings of the source, the dead letters, record limits and batches."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import PositiveInt, SecretStr, WithJsonSchema, field_validator, model_validator

from streamlearn.settings.section import Int32, Seconds, Section, is_loopback, shown_server

_KAFKA_REFUSED = {
    "enable_auto_commit": "offsets are committed after each snapshot; remove the key",
    "auto_offset_reset": "use offset.start (earliest or latest), which applies to topics without a snapshot",
    "group_protocol": "partitions are assigned, not subscribed to; remove the key",
    "sasl_jaas_config": "use sasl.mechanism, and its own keys: sasl.plain.username and sasl.plain.password.file, "
    "or sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret.file",
    "topics_regex": "use topics.pattern",
    "ssl_truststore_location": "use ssl.cafile with a PEM file",
    "ssl_keystore_location": "use ssl.certfile and ssl.keyfile with PEM files",
    "value_deserializer": "records are decoded as `stream` configures; remove the key",
}

_IN_CLEAR_TEXT = {"PLAIN": "password", "OAUTHBEARER": "token"}
"""Mechanisms that send what it takes to authenticate."""


class KafkaSettings(Section):
    """An Apache Kafka cluster; keys have Kafka's names."""

    bootstrap_servers: str
    """Comma-separated host:port of one or more brokers."""
    topics: Annotated[
        tuple[str, ...], WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    ] = ()
    """Topics to learn from. Every partition is read, including those added later. Set this or topics.pattern."""
    topics_pattern: str | None = None
    """Regular expression; every topic whose whole name it matches is read. One that is created later is found within
    metadata.max.age.ms and read from its first record. Internal topics (names that begin with __) are left out."""
    group_id: str = "streamlearn"
    """Group to which offsets are committed after each snapshot, for lag monitoring only. No consumer may use it."""
    client_id: str = "streamlearn"
    """Client name in the brokers' logs and quotas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "SASL_SSL"
    """PLAINTEXT and SASL_PLAINTEXT need brokers on this machine or allow_plaintext."""
    allow_plaintext: bool = False
    """Whether to allow unencrypted connections to brokers on other machines."""
    sasl_mechanism: (
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM", "GSSAPI"] | None
    ) = None
    """Required for the SASL protocols. AWS_MSK_IAM (extra `msk`) takes credentials and region from the environment, as
    the AWS CLI does; GSSAPI (extra `kerberos`) takes tickets from kinit or a keytab in KRB5_CLIENT_KTNAME."""
    sasl_plain_username: str | None = None
    """User name for PLAIN and SCRAM."""
    sasl_plain_password: SecretStr | None = None
    """Password for PLAIN and SCRAM; prefer sasl.plain.password.file."""
    sasl_plain_password_file: Path | None = None
    """File with the password in its first line, for example a systemd credential."""
    sasl_oauthbearer_token_endpoint_url: str | None = None
    """OAUTHBEARER: endpoint that gives tokens to a client (OAuth client credentials). A proxy is taken from
    HTTPS_PROXY."""
    sasl_oauthbearer_client_id: str | None = None
    """OAUTHBEARER: client for the endpoint."""
    sasl_oauthbearer_client_secret_file: Path | None = None
    """OAUTHBEARER: file with the client's secret in its first line; it is read for each token."""
    sasl_oauthbearer_scope: str | None = None
    """OAUTHBEARER: scope to request."""
    sasl_oauthbearer_cafile: Path | None = None
    """OAUTHBEARER: PEM file of the CAs that may sign the endpoint's certificate; by default the system's CAs."""
    sasl_oauthbearer_token_file: Path | None = None
    """OAUTHBEARER: file with a token that another program renews, instead of an endpoint; read for each session."""
    sasl_oauthbearer_extensions: dict[str, str] | None = None
    """OAUTHBEARER: SASL extensions, for example logicalCluster and identityPoolId for Confluent Cloud."""
    sasl_kerberos_service_name: str = "kafka"
    """GSSAPI: service in the brokers' principals (service/host@REALM)."""
    sasl_kerberos_domain_name: str | None = None
    """GSSAPI: host in the brokers' principals; by default the host that is connected to."""
    ssl_cafile: Path | None = None
    """PEM file of the CAs that may sign the brokers' certificates; by default the system's CAs."""
    ssl_certfile: Path | None = None
    """Client certificate (PEM)."""
    ssl_keyfile: Path | None = None
    """Key of the client certificate (PEM)."""
    offset_start: Literal["earliest", "latest"] = "earliest"
    """Where to start in a topic that was never read. Partitions added later always start at their earliest offset."""
    offset_gap_policy: Literal["fail", "earliest", "latest"] = "fail"
    """What to do if retention deleted untrained records: stop (fail), or continue at the earliest or latest offset."""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """read_uncommitted also reads records of open and aborted transactions."""
    request_timeout_ms: Int32 = 30_000
    """Timeout of a request to a broker, milliseconds."""
    max_poll_records: Int32 = 500
    """Maximum records per poll."""
    max_partition_fetch_bytes: Int32 = 1 << 20
    """Maximum bytes per partition and fetch request."""
    fetch_max_bytes: Int32 = 8 << 20
    """Maximum bytes per fetch request."""
    max_decompressed_bytes: PositiveInt = 256 << 20
    """Maximum decompressed size of a record batch, bytes; a larger batch is treated as unreadable."""
    metadata_max_age_ms: Int32 = 60_000
    """Interval at which topics are checked for new partitions, milliseconds."""
    stall_timeout_s: Seconds = 60.0
    """Time without a record, despite lag, after which the consumer is rebuilt, seconds."""
    lag_interval_s: Seconds = 10.0
    """Interval at which end offsets are requested to compute lag, seconds."""

    @field_validator("bootstrap_servers")
    @classmethod
    def _are_hosts(cls, servers: str) -> str:
        named = [server.strip() for server in servers.split(",") if server.strip()]
        for server in named:
            if not re.fullmatch(r"(\w+://)?[\w.:%\[\]-]*", server):
                raise ValueError(f"expected host:port of brokers, separated by commas, found {shown_server(servers)}")
            port = re.search(r"[^:]:(\d+)$", server)
            if port and not 0 < int(port[1]) < 2**16:
                raise ValueError(f"expected a port from 1 to 65535, found {server}")
        if not named:
            raise ValueError("expected host:port of a broker, found none")
        return ",".join(named)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_work(cls, values: Any) -> Any:
        for key, instead in _KAFKA_REFUSED.items():
            if isinstance(values, dict) and key in values:
                raise ValueError(f"{key.replace('_', '.')} is not supported: {instead}")
        if isinstance(values, dict) and isinstance(values.get("topics"), str):
            topics = (topic.strip() for topic in values["topics"].split(","))
            values = {**values, "topics": tuple(topic for topic in topics if topic)}
        return values

    @model_validator(mode="after")
    def _secure(self) -> Self:
        hosts = [server.rsplit(":", 1)[0] for server in self.bootstrap_servers.split(",")]
        loopback = all(is_loopback(host) for host in hosts)
        unencrypted = self.security_protocol in ("PLAINTEXT", "SASL_PLAINTEXT")
        if unencrypted and not loopback and not self.allow_plaintext:
            raise ValueError(
                f"security.protocol is {self.security_protocol}, but {self.bootstrap_servers} is not on this machine: "
                "use SSL or SASL_SSL, or set allow_plaintext: true"
            )
        if self.security_protocol == "SASL_PLAINTEXT" and self.sasl_mechanism in _IN_CLEAR_TEXT and not loopback:
            sent = _IN_CLEAR_TEXT[self.sasl_mechanism]
            raise ValueError(f"{self.sasl_mechanism} over SASL_PLAINTEXT sends the {sent} in clear text: use SASL_SSL")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl.keyfile is the key of ssl.certfile: set both or neither")
        if self.security_protocol.startswith("SASL"):
            self._check_sasl()
        return self

    @model_validator(mode="after")
    def _names_topics(self) -> Self:
        if bool(self.topics) == (self.topics_pattern is not None):
            both = "both" if self.topics else "neither"
            raise ValueError(f"either topics or topics.pattern must be set, found {both}")
        if self.topics_pattern is not None:
            try:
                re.compile(self.topics_pattern)
            except re.error as error:
                found = f"{self.topics_pattern!r:.100}: {error}"
                raise ValueError(
                    f"topics.pattern must be a regular expression like orders-.*, found {found}"
                ) from error
        return self

    def reads(self, topic: str) -> bool:
        """Whether a topic of this name is learned from."""
        if self.topics_pattern is None:
            return topic in self.topics
        return not topic.startswith("__") and re.fullmatch(self.topics_pattern, topic) is not None

    def _check_sasl(self) -> None:
        """Check that the mechanism has what it needs.

        Raises:
            ValueError: it has not.
        """
        if self.sasl_mechanism == "OAUTHBEARER":
            self._check_oauth()
        elif self.sasl_mechanism == "AWS_MSK_IAM":
            if self.security_protocol != "SASL_SSL":
                raise ValueError(f"AWS_MSK_IAM needs security.protocol SASL_SSL, found {self.security_protocol}")
        elif self.sasl_mechanism != "GSSAPI":
            password = self.sasl_plain_password is not None or self.sasl_plain_password_file is not None
            if self.sasl_mechanism is None or self.sasl_plain_username is None or not password:
                raise ValueError(
                    f"security.protocol {self.security_protocol} needs sasl.mechanism, sasl.plain.username and "
                    "sasl.plain.password.file; for a local broker without them set security.protocol: PLAINTEXT"
                )

    def _check_oauth(self) -> None:
        url, client, secret = (
            self.sasl_oauthbearer_token_endpoint_url,
            self.sasl_oauthbearer_client_id,
            self.sasl_oauthbearer_client_secret_file,
        )
        if self.sasl_oauthbearer_token_file is not None:
            if any(value is not None for value in (url, client, secret, self.sasl_oauthbearer_scope)):
                raise ValueError("sasl.oauthbearer.token.file replaces an endpoint: remove the endpoint's settings")
            return
        if url is None or client is None or secret is None:
            raise ValueError(
                "OAUTHBEARER needs sasl.oauthbearer.token.endpoint.url, sasl.oauthbearer.client.id and "
                "sasl.oauthbearer.client.secret.file, or sasl.oauthbearer.token.file"
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                "sasl.oauthbearer.token.endpoint.url must be https://HOST/PATH; the credentials belong into "
                "sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret.file"
            )
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            found = shown_server(url)
            raise ValueError(
                f"sasl.oauthbearer.token.endpoint.url must be https, found {found}: it receives the secret"
            )


class JsonlSettings(Section):
    """A JSONL file as a stream: one record per line, gzip if the name ends in .gz."""

    path: Path
    """Path of the file, relative to the configuration file. A restart continues in a file of the same name and first
    line; one of another name is read from its beginning."""
    follow: bool = False
    """Whether to wait for appended lines at the end of the file instead of stopping; not with gzip."""
    poll_interval_s: Seconds = 0.2
    """Interval at which a followed file is checked for new lines, seconds."""

    @model_validator(mode="after")
    def _followable(self) -> Self:
        if self.follow and self.path.suffix == ".gz":
            raise ValueError(f"{self.path} is gzip and cannot be followed: decompress it or set follow: false")
        return self


class SourceSettings(Section):
    """The connector that records are read from; exactly one."""

    kafka: KafkaSettings | None = None
    """Read Kafka topics."""
    jsonl: JsonlSettings | None = None
    """Replay or follow a JSONL file."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of kafka and jsonl must be set, found {' and '.join(given) or 'none'}")
        return self


class DeadLetterSettings(Section):
    """Where unusable records are written, with the reason."""

    topic: str | None = None
    """Topic in the cluster of source.kafka; it must exist."""
    file: Path | None = None
    """JSONL file, relative to the configuration file; dead_letters.jsonl in the state folder if neither key is set."""

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.topic is not None and self.file is not None:
            raise ValueError("topic and file exclude each other: set one of them")
        return self


class StreamSettings(Section):
    """Limits of a record, and how records are grouped into batches."""

    max_record_bytes: PositiveInt = 1 << 20
    """Maximum size of a record value, bytes."""
    max_string_chars: PositiveInt = 1 << 18
    """Maximum length of a string in a record, characters."""
    max_depth: PositiveInt = 32
    """Maximum nesting depth of a record's JSON."""
    max_items: PositiveInt = 1 << 16
    """Maximum elements of a list or object in a record."""
    max_images: PositiveInt = 8
    """Maximum images per record."""
    max_image_pixels: PositiveInt = 16_000_000
    """Maximum width times height of an image, pixels; read from its header before it is decoded."""
    max_tokens: PositiveInt = 1024
    """Maximum length of a record after tokenization, tokens."""
    overlong: Literal["middle", "truncate", "dead_letter"] = "middle"
    """What happens to a longer record: middle keeps the head and the tail of the prompt, and of a conversation the
    system message and the last turns; truncate removes the start of the prompt; both remove the end of plain text;
    dead_letter sets the record aside. Shift detection reads the whole prompt."""
    batch_tokens: PositiveInt = 2048
    """Maximum tokens per batch; a record that would exceed it starts the next batch."""
    batch_records: PositiveInt = 8
    """Maximum records per batch."""
    linger_s: Seconds | None = 60.0
    """Time without a new record after which all that was read is trained on, seconds; null waits for more records
    without a limit. If records come further apart than this, each is a batch of its own, and a shift is found only
    after its first records."""

    @model_validator(mode="after")
    def _a_record_fits(self) -> Self:
        if self.max_tokens > self.batch_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} exceeds batch_tokens {self.batch_tokens}: "
                "the longest record must fit in a batch"
            )
        if self.max_tokens < 2:
            raise ValueError("max_tokens must be at least 2, since one token predicts the next")
        return self
