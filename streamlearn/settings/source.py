"""Where records come from, where unusable ones go, and how they become batches."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)

from streamlearn.settings.section import Section, is_loopback

_KAFKA_REFUSED = {
    "enable_auto_commit": "offsets are committed after each snapshot; remove the key",
    "auto_offset_reset": "use offset.start (earliest or latest) for partitions that no snapshot knows",
    "group_protocol": "partitions are assigned, not subscribed to; remove the key",
    "sasl_jaas_config": "use sasl.mechanism, sasl.plain.username and sasl.plain.password.file",
    "ssl_truststore_location": "use ssl.cafile with a PEM file",
    "ssl_keystore_location": "use ssl.certfile and ssl.keyfile with PEM files",
    "value_deserializer": "records are decoded by stream; remove the key",
}


class KafkaSettings(Section):
    """An Apache Kafka cluster, in Kafka's own names."""

    bootstrap_servers: str
    """Comma-separated host:port of some brokers."""
    topics: tuple[str, ...] = Field(min_length=1)
    """Topics to learn from; every partition of each is read, new partitions as they appear."""
    group_id: str = "streamlearn"
    """Where offsets are committed after each snapshot, for lag tools alone. Use an id that no consumer group shares."""
    client_id: str = "streamlearn"
    """Name in the broker's logs and quotas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "SASL_SSL"
    """PLAINTEXT is accepted for loopback brokers, elsewhere only with allow_plaintext."""
    allow_plaintext: bool = False
    """Accept an unencrypted connection to a broker that is not on this machine."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    """Required with the SASL protocols."""
    sasl_plain_username: str | None = None
    """User for PLAIN and SCRAM."""
    sasl_plain_password: SecretStr | None = None
    """Password for PLAIN and SCRAM; prefer sasl.plain.password.file."""
    sasl_plain_password_file: Path | None = None
    """File whose first line is the password, for example a systemd credential."""
    ssl_cafile: Path | None = None
    """PEM file of the authorities that may sign the broker's certificate; the system's own when absent."""
    ssl_certfile: Path | None = None
    """PEM client certificate."""
    ssl_keyfile: Path | None = None
    """PEM client key."""
    offset_start: Literal["earliest", "latest"] = "earliest"
    """Where a topic begins that no snapshot knows; partitions that are added to it later begin at their earliest."""
    offset_gap_policy: Literal["fail", "earliest", "latest"] = "fail"
    """What to do when retention deleted untrained records: stop, go on with the first that is left, or at the end."""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """Whether records of open and aborted transactions are read."""
    request_timeout_ms: PositiveInt = 30_000
    """How long one request to a broker may take."""
    max_poll_records: PositiveInt = 500
    """Records returned by one poll."""
    max_partition_fetch_bytes: PositiveInt = 1 << 20
    """Bytes fetched per partition and request."""
    fetch_max_bytes: PositiveInt = 8 << 20
    """Bytes fetched per request."""
    max_decompressed_bytes: PositiveInt = 256 << 20
    """Bytes that one compressed batch may unpack to; a larger one is a batch that cannot be read."""
    metadata_max_age_ms: PositiveInt = 60_000
    """How often topics are looked at for new partitions."""
    stall_timeout_s: PositiveFloat = 60.0
    """With lag and no record for this long, the consumer is closed and built anew."""
    lag_interval_s: PositiveFloat = 10.0
    """How often end offsets are asked for."""

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
        hosts = [server.rsplit(":", 1)[0].strip() for server in self.bootstrap_servers.split(",")]
        loopback = all(is_loopback(host) for host in hosts)
        unencrypted = self.security_protocol in ("PLAINTEXT", "SASL_PLAINTEXT")
        if unencrypted and not loopback and not self.allow_plaintext:
            raise ValueError(
                f"security.protocol is {self.security_protocol} and {self.bootstrap_servers} is not on this machine: "
                "use SSL or SASL_SSL, or set allow_plaintext: true"
            )
        if self.security_protocol == "SASL_PLAINTEXT" and self.sasl_mechanism == "PLAIN" and not loopback:
            raise ValueError("PLAIN over SASL_PLAINTEXT sends the password in clear: use SASL_SSL")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl.keyfile is the key of ssl.certfile: set both, or neither")
        if self.security_protocol.startswith("SASL"):
            password = self.sasl_plain_password is not None or self.sasl_plain_password_file is not None
            if self.sasl_mechanism is None or self.sasl_plain_username is None or not password:
                raise ValueError(
                    f"security.protocol {self.security_protocol} needs sasl.mechanism, sasl.plain.username and "
                    "sasl.plain.password.file; for a local broker without them set security.protocol: PLAINTEXT"
                )
        return self


class JsonlSettings(Section):
    """A JSONL file as a stream: one record a line, gzip when the name ends in .gz."""

    path: Path
    """The file, relative to the configuration file."""
    follow: bool = False
    """Wait for lines to be appended instead of stopping at the end; not for gzip."""
    poll_interval_s: PositiveFloat = 0.2
    """How often a followed file is looked at."""

    @model_validator(mode="after")
    def _followable(self) -> Self:
        if self.follow and self.path.suffix == ".gz":
            raise ValueError(f"{self.path} is gzip and cannot be followed: decompress it or set follow: false")
        return self


class SourceSettings(Section):
    """Where records come from: exactly one connector."""

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
    """Where unusable records go, with the reason."""

    topic: str | None = None
    """A topic of source.kafka's cluster; without it, a file."""
    file: Path | None = None
    """A JSONL file; dead_letters.jsonl in the state folder when neither is set."""

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.topic is not None and self.file is not None:
            raise ValueError("topic and file exclude each other: keep one")
        return self


class StreamSettings(Section):
    """What a record may hold, and how records become batches."""

    max_record_bytes: PositiveInt = 1 << 20
    """Largest record value, bytes."""
    max_string_chars: PositiveInt = 1 << 18
    """Longest string in a record, characters."""
    max_depth: PositiveInt = 32
    """Deepest nesting of a record's JSON."""
    max_items: PositiveInt = 1 << 16
    """Longest list or object in a record."""
    max_images: PositiveInt = 8
    """Most images in a record."""
    max_image_pixels: PositiveInt = 16_000_000
    """Largest image, width times height; told from its header, before it is decoded."""
    max_tokens: PositiveInt = 1024
    """Longest record after tokenising, tokens."""
    overlong: Literal["truncate", "dead_letter"] = "truncate"
    """What happens to a longer one: the prompt loses its beginning (plain text its end), or it is a dead letter."""
    batch_tokens: PositiveInt = 2048
    """A batch is closed by the record that would exceed this many tokens."""
    batch_records: PositiveInt = 8
    """A batch is closed at this many records."""

    @model_validator(mode="after")
    def _a_record_fits(self) -> Self:
        if self.max_tokens > self.batch_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} exceeds batch_tokens {self.batch_tokens}: the longest record must fit "
                "into a batch"
            )
        if self.max_tokens < 2:
            raise ValueError("max_tokens must be at least 2: one token predicts the next")
        return self
