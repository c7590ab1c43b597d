"""The configuration: one frozen section per room, read from YAML, overridden by the environment.

    source.kafka.bootstrap_servers   <-   STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS

Kafka's dotted names (`bootstrap.servers`) are accepted wherever an underscore stands. Unknown keys are refused with the
nearest known one, and everything that can be checked without the model or the broker is checked here.
"""

import difflib
import hashlib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import orjson
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from streamlearn.errors import ConfigError

ENV_PREFIX = "STREAMLEARN_"


class Section(BaseModel):
    """One room's settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
        loopback = all(_is_loopback(host) for host in hosts)
        unencrypted = self.security_protocol in ("PLAINTEXT", "SASL_PLAINTEXT")
        if unencrypted and not loopback and not self.allow_plaintext:
            raise ValueError(
                f"security.protocol is {self.security_protocol} and {self.bootstrap_servers} is not on this machine: "
                "use SSL or SASL_SSL, or set allow_plaintext: true"
            )
        if self.security_protocol == "SASL_PLAINTEXT" and self.sasl_mechanism == "PLAIN" and not loopback:
            raise ValueError("PLAIN over SASL_PLAINTEXT sends the password in clear: use SASL_SSL")
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


class BackboneSettings(Section):
    """The frozen model."""

    model: str = "builtin:nano"
    """builtin:nano, a local folder (./, ../, / or ~ in front; relative to the configuration file), or a hub id."""
    revision: str | None = None
    """Commit of a hub id, 40 hex digits; required for a hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of a step; auto asks the machine which is faster."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU when there is one."""


Bias = Literal["none", "soft", "claims"]


class AdapterSettings(Section):
    """The trainable experts: a preset, and what to change of it."""

    preset: Literal["streamlearn", "mh-moe", "cp-moe", "loramoe", "mot", "lora"] = "streamlearn"
    """A row of options on the one adapter layer and its objective."""
    rank: PositiveInt | None = None
    """Rank of an expert."""
    alpha: PositiveFloat | None = None
    """LoRA alpha; the update is scaled by alpha / rank."""
    num_heads: PositiveInt | None = None
    """Slices of a token's vector that are routed on their own; must divide every target's input size."""
    num_experts: PositiveInt | None = None
    """Experts in each head's bank."""
    top_k: PositiveInt | None = None
    """Experts selected per head and token."""
    router_gradient: Literal["straight_through", "native", "selected", "none"] | None = None
    """How a router learns from the task loss; none leaves it at its random start."""
    target_modules: tuple[str, ...] | None = None
    """Names of the linears that get an adapter, for example gate_proj, up_proj, down_proj."""
    bias: Bias | None = None
    """How a new regime steers routing: none, soft (CKA times bias_strength), claims (experts of its own)."""
    bias_strength: NonNegativeFloat | None = None
    """alpha of CP-MoE eq. 10, for the soft bias."""
    experts_claimed: PositiveInt = 1
    """Experts per head that a regime claims; with more than one, tokens choose among them."""


class LearnerSettings(Section):
    """The optimizer, its objective and its guards."""

    lr: PositiveFloat = 1e-4
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays (MH-MoE A.3.4)."""
    eps: PositiveFloat = 1e-6
    """AdamW's epsilon (MH-MoE A.3.4)."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay (MH-MoE A.3.4)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero."""
    router_lr: NonNegativeFloat | None = None
    """Learning rate of the routers, as a part of lr: 1 as fast as the experts, 0 frozen."""
    balance_strength: NonNegativeFloat | None = None
    """gamma of CP-MoE eq. 15: how strongly tokens are spread over a bank's experts."""
    localized_balance: NonNegativeFloat | None = None
    """beta of LoRAMoE eq. 9: how strongly sample types are kept to their experts."""
    sample_types: tuple[str, str] = ("downstream", "world_knowledge")
    """Values of the record field sample_type: the first half of a bank's experts is for the first, the rest for the
    second (LoRAMoE)."""
    ffn_steps: PositiveInt = 50
    """Length of MoT's stage I, in steps: MLP experts alone, normalised gradients."""
    attention_steps: PositiveInt = 50
    """Length of MoT's stage II, in steps: attention experts alone; stage III, MLP experts again, has no end."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    max_bad_batches: PositiveInt = 3
    """So many batches with a non-finite loss or gradient in a row roll back to the last snapshot."""


class ProbeSettings(Section):
    """The transient expert that looks at a new regime before anything is learned from it."""

    enabled: bool = True
    """Whether new regimes are probed; without it experts are claimed by use alone."""
    warmup_tokens: PositiveInt = 10_000
    """Tokens of the new regime that it is trained on (CP-MoE: 10,000 of text, 100,000 of image-text)."""
    lr: PositiveFloat = 1e-2
    """Its learning rate; it has few steps and is thrown away."""
    similarity_tokens: PositiveInt = 1024
    """Tokens on which CKA is taken."""


class ConsolidateSettings(Section):
    """What protects old knowledge."""

    anchor_strength: NonNegativeFloat | None = None
    """lambda of CP-MoE eq. 15: how strongly important weights are held; 0 holds nothing."""
    importance: Literal["path", "transient"] = "path"
    """Where importance is measured: along the training of the experts themselves, or along the transient expert's."""
    coordinates: Literal["bank", "random", "invariant"] = "bank"
    """How a transient expert's importance is carried over: it starts from the bank's A, from an A of its own (CP-MoE as
    written), or is summed over the rank so that no rotation of it matters."""
    damping: PositiveFloat = 1e-3
    """xi of CP-MoE eq. 7."""


class ShiftSettings(Section):
    """When a new regime is declared, and how many are remembered."""

    enabled: bool = True
    """Whether shifts are looked for; without it the whole stream is one regime."""
    false_alarms_per_million: PositiveFloat = 1.0
    """Expected false alarms per million records of a stationary stream; thresholds are quantiles for it."""
    lookahead_records: NonNegativeInt = 16
    """Records held back from training, so that a shift is known before its first record is trained on."""
    min_dwell_records: PositiveInt = 64
    """Records before a new regime may be left again."""
    max_regimes: int = Field(default=32, ge=2, le=256)
    """Regimes remembered; each takes about 27 kB of memory and 36 kB of a snapshot."""


class HoldoutSettings(Section):
    """Records of each regime that are never trained on: they tell, all the time, what was forgotten."""

    every_records: NonNegativeInt = 20
    """Every so many records of a regime one is kept out; 0 keeps none."""
    records_per_regime: PositiveInt = 16
    """Records kept for each regime, a uniform sample of those kept out."""
    time_share: float = Field(default=0.01, ge=0.0, le=0.5)
    """Part of the training time that may go to scoring them; idle time is free."""


class SnapshotSettings(Section):
    """When state goes to disk, and how much is kept."""

    every_records: PositiveInt = 1000
    """Records between snapshots."""
    every_s: PositiveFloat = 300.0
    """Seconds between snapshots, when something was trained since."""
    keep: int = Field(default=3, ge=2)
    """Snapshots kept; the newest may be damaged, so at least two."""


class ServeSettings(Section):
    """The local HTTP endpoint."""

    enabled: bool = True
    """Whether it is served."""
    host: str = "127.0.0.1"
    """Loopback address to bind."""
    port: int = Field(default=8083, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which the log names."""
    queue_size: PositiveInt = 8
    """Eval and generate jobs that may wait; more are answered 503 with Retry-After."""
    eval_budget_s: PositiveFloat = 0.5
    """Longest pause of training for eval jobs between two steps."""
    max_body_bytes: PositiveInt = 1 << 20
    """Largest request body."""
    max_examples: PositiveInt = 1024
    """Examples in one eval request."""
    max_new_tokens: PositiveInt = 256
    """Tokens that one generation may add."""

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        if not _is_loopback(host):
            raise ValueError(f"{host} is not a loopback address: the endpoint has no authentication, bind 127.0.0.1")
        return host


class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""
    style: Literal["auto", "json", "console"] = "auto"
    """auto is console on a terminal, JSON elsewhere."""


class Settings(BaseSettings):
    """A whole configuration file."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    state: Path = Path("state")
    """Folder of snapshots, journal and lock, relative to the configuration file."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    source: SourceSettings
    """Where records come from."""
    stream: StreamSettings = StreamSettings()
    """Records and batches."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """Unusable records."""
    backbone: BackboneSettings = BackboneSettings()
    """The frozen model."""
    adapter: AdapterSettings = AdapterSettings()
    """The experts."""
    shift: ShiftSettings = ShiftSettings()
    """Regimes."""
    learner: LearnerSettings = LearnerSettings()
    """Optimizer, objective and guards."""
    probe: ProbeSettings = ProbeSettings()
    """Transient experts."""
    consolidate: ConsolidateSettings = ConsolidateSettings()
    """Importance and anchors."""
    holdout: HoldoutSettings = HoldoutSettings()
    """Live forgetting."""
    snapshot: SnapshotSettings = SnapshotSettings()
    """Durable state."""
    serve: ServeSettings = ServeSettings()
    """HTTP."""
    log: LogSettings = LogSettings()
    """Logging."""

    @model_validator(mode="after")
    def _dead_letter_topic_has_a_cluster(self) -> Self:
        if self.dead_letters.topic is not None:
            if self.source.kafka is None:
                raise ValueError("dead_letters.topic needs source.kafka: use dead_letters.file with a jsonl source")
            if self.dead_letters.topic in self.source.kafka.topics:
                raise ValueError(
                    f"dead_letters.topic {self.dead_letters.topic} is a source topic: it would feed itself"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment over what `load` read from YAML; no .env files, no secrets folder."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


FINGERPRINTED = ("seed", "stream", "shift", "backbone", "adapter", "learner", "probe", "consolidate", "holdout")
"""Sections that decide what a record does to the weights; the others may change between runs."""


def load(path: Path) -> Settings:
    """Read, override from the environment, check, and resolve paths against the file's folder.

    Raises:
        ConfigError: names every wrong key, what was found and the nearest known key.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a mapping of sections must stand here, found {type(raw).__name__}")
    unknown = [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and not _env_name_is_known(name)]
    if unknown:
        raise ConfigError(
            "\n".join(f"{name}: unknown setting in the environment, {_nearest_env(name)}" for name in unknown)
        )
    try:
        settings = Settings(**raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in explain(error))) from error
    return _resolved(settings, path.resolve().parent)


def fingerprint(settings: Settings) -> dict[str, Any]:
    """The values of the fingerprinted sections, JSON-ready: what a snapshot's manifest keeps.

    The device is left out: a run may move to another machine, only not bit for bit.
    """
    return settings.model_dump(mode="json", include=set(FINGERPRINTED), exclude={"backbone": {"device"}})


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of canonical JSON, hex."""
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()


def explain(error: ValidationError) -> list[str]:
    """One line a fault: dotted key, what is wrong, what was found, the nearest known key."""
    lines = []
    for fault in error.errors():
        location = [part for part in fault["loc"] if isinstance(part, str)]
        key = ".".join(location)
        if fault["type"] == "extra_forbidden":
            *parents, name = location
            known = _section_keys(parents)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            options = f"did you mean {'.'.join([*parents, near[0]])}?" if near else f"known here: {', '.join(known)}"
            lines.append(f"{key}: unknown key, {options}")
        elif fault["type"] == "missing":
            lines.append(f"{key}: required, not found")
        else:
            found = fault["input"]
            scalar = isinstance(found, str | int | float | bool) and "password" not in key
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{key or 'configuration'}: {message}" + (f", found {found!r}" if scalar else ""))
    return lines


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field's annotation (`X` or `X | None`), or None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _section_keys(path: list[str]) -> list[str]:
    model: type[BaseModel] = Settings
    for name in path:
        field = model.model_fields.get(name)
        inner = section_type(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _env_name_is_known(name: str) -> bool:
    *parents, last = name.upper().removeprefix(ENV_PREFIX).lower().split("__")
    return last in _section_keys(parents)


def _nearest_env(name: str) -> str:
    parts = name.upper().removeprefix(ENV_PREFIX).lower().split("__")
    for depth in range(len(parts)):
        known = _section_keys(parts[:depth])
        if parts[depth] not in known:
            near = difflib.get_close_matches(parts[depth], known, n=1, cutoff=0.5)
            if near:
                right = "__".join([*parts[:depth], near[0], *parts[depth + 1 :]]).upper()
                return f"did you mean {ENV_PREFIX}{right}?"
            return f"known here: {', '.join(known) or 'nothing'}"
    return "it names a section, not a value"


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML; dots in keys are underscores, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping with unique keys."""
        seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True)).replace(".", "_")
            if key in seen:
                raise yaml.MarkedYAMLError(
                    f"the first {key}", seen[key], f"{key} stands a second time; keep one", key_node.start_mark
                )
            seen[key] = key_node.start_mark
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return {str(key).replace(".", "_"): value for key, value in values.items()}


def _resolved(settings: Settings, folder: Path) -> Settings:
    """Relative paths mean: relative to the configuration file."""

    def visit(section: BaseModel) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, Path):
                changed[name] = (folder / value.expanduser()).resolve()
            elif isinstance(value, Section):
                changed[name] = value.model_copy(update=visit(value))
        return changed

    changed = visit(settings)
    model = settings.backbone.model
    if model.startswith(("./", "../", "/", "~")):
        changed["backbone"] = settings.backbone.model_copy(
            update={"model": str((folder / Path(model).expanduser()).resolve())}
        )
    return settings.model_copy(update=changed)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
