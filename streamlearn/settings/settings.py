"""The whole configuration: its sections, how it is loaded, and the part of it that a snapshot depends on."""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, get_args

import orjson
from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from streamlearn.errors import ConfigError
from streamlearn.settings.faults import faults
from streamlearn.settings.learning import (
    AdapterSettings,
    BackboneSettings,
    ConsolidateSettings,
    HoldoutSettings,
    LearnerSettings,
    ProbeSettings,
    ShiftSettings,
)
from streamlearn.settings.records import RecordsSettings
from streamlearn.settings.section import Section
from streamlearn.settings.serving import (
    DistributedSettings,
    LogSettings,
    LogStyle,
    PublishSettings,
    ServeSettings,
    SnapshotSettings,
    TrackSettings,
)
from streamlearn.settings.source import DeadLetterSettings, SourceSettings, StreamSettings
from streamlearn.settings.values import ENV_PREFIX, Environment, merged, read_yaml


class Settings(Section, BaseSettings):
    """The sections and top-level keys of a configuration file."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__")

    state: Path = Path("state")
    """Folder of snapshots, journal and lock; relative to the configuration file. One daemon per folder."""
    seed: NonNegativeInt = 0
    """Seed of all random numbers."""
    source: SourceSettings
    """The connector that records are read from."""
    records: RecordsSettings = RecordsSettings()
    """What a record is made of."""
    stream: StreamSettings = StreamSettings()
    """Limits of a record, and batches."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """Where unusable records go."""
    backbone: BackboneSettings = BackboneSettings()
    """The frozen model."""
    adapter: AdapterSettings = AdapterSettings()
    """The trainable experts."""
    shift: ShiftSettings = ShiftSettings()
    """Shift detection and regimes."""
    learner: LearnerSettings = LearnerSettings()
    """Optimizer, objective and safeguards."""
    probe: ProbeSettings = ProbeSettings()
    """Transient experts."""
    consolidate: ConsolidateSettings = ConsolidateSettings()
    """Importance and anchors."""
    holdout: HoldoutSettings = HoldoutSettings()
    """Records that measure forgetting."""
    snapshot: SnapshotSettings = SnapshotSettings()
    """When and how snapshots are written."""
    serve: ServeSettings = ServeSettings()
    """HTTP endpoint."""
    publish: PublishSettings | None = None
    """Where regimes are published as plain LoRAs; off if unset."""
    track: TrackSettings | None = None
    """Experiment trackers that receive the run's series; none if unset."""
    distributed: DistributedSettings = DistributedSettings()
    """Several processes."""
    log: LogSettings = LogSettings()
    """Logging."""

    @property
    def dead_letter_file(self) -> Path | None:
        """The file that dead letters are written to; None: they go to a topic."""
        if self.dead_letters.topic is not None:
            return None
        return self.dead_letters.file or self.state / "dead_letters.jsonl"

    @property
    def published_folder(self) -> Path | None:
        """The folder that the publisher writes: `publish.folder` or, for an object store, what is copied there."""
        if self.publish is None:
            return None
        return self.publish.folder if isinstance(self.publish.folder, Path) else self.state / "published"

    @model_validator(mode="after")
    def _dead_letter_topic_has_a_cluster(self) -> Self:
        if self.dead_letters.topic is not None:
            if self.source.kafka is None:
                raise ValueError("dead_letters.topic needs source.kafka: use dead_letters.file with a jsonl source")
            if self.source.kafka.reads(self.dead_letters.topic):
                setting = "topics" if self.source.kafka.topics_pattern is None else "topics.pattern"
                raise ValueError(
                    f"dead_letters.topic must not be one of source.kafka.{setting}, found {self.dead_letters.topic}: "
                    "dead letters would be read as records"
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
        """Environment variables, read in the forms of YAML, then given values; no .env files, no secrets folder."""
        del env_settings, dotenv_settings, file_secret_settings
        environment = Environment.read(os.environ, settings_cls)
        return InitSettingsSource(settings_cls, init_kwargs=dict(environment.values)), init_settings


WARMUP_TOKENS = {False: 10_000, True: 100_000}
"""probe.warmup_tokens by whether the backbone reads images; CP-MoE (arXiv 2605.20247) section 4."""
LEARNING_RATES = {False: 3e-4, True: 3e-3}
"""learner.lr by whether each regime has an adapter of its own; near the best of seven rates on development records of
six SuperNI tasks, for SmolLM2-135M (docs/evidence/search.md) and, with adapters of their own, nano (one seed each)."""
DECAY_UPDATES = 20
"""learner.lr_decay_updates where each regime has an adapter of its own: on development records of four SuperNI tasks,
nano has a token accuracy of .601, vs .594 at a constant rate (one seed each)."""
FINGERPRINTED = ("seed", "stream", "shift", "backbone", "adapter", "learner", "probe", "consolidate", "holdout")
"""Sections that decide how records change the weights; the others may change between runs."""


def with_defaults(settings: Settings, *, is_vision: bool, per_regime: bool) -> Settings:
    """Fill in the values that depend on others.

    Args:
        settings: Its values are kept.
        is_vision: Whether the backbone reads images.
        per_regime: Whether each regime has an adapter of its own.
    """
    learner = settings.learner.model_copy(update={"lr": settings.learner.lr or LEARNING_RATES[per_regime]})
    if per_regime and learner.lr_decay_updates is None:
        learner = learner.model_copy(update={"lr_decay_updates": DECAY_UPDATES})
    tokens = settings.probe.warmup_tokens or WARMUP_TOKENS[is_vision]
    probe = settings.probe.model_copy(update={"warmup_tokens": tokens})
    return settings.model_copy(update={"learner": learner, "probe": probe})


def fingerprint(settings: Settings) -> dict[str, Any]:
    """The values of the fingerprinted sections, JSON-ready, as a snapshot's manifest stores them.

    The device is omitted: a run may continue on another machine, though not bit for bit. So is the linger: a replay
    takes flushes from the journal. Offloading, sharding, activation checkpointing and canaries change no bit. Of the
    section records only what is set is stored.
    """
    omitted = {
        "backbone": {"device", "shard"},
        "stream": {"linger_s"},
        "adapter": {"max_in_memory"},
        "learner": {"activation_checkpointing"},
        "holdout": {"canaries"},
    }
    values = settings.model_dump(mode="json", include=set(FINGERPRINTED), exclude=omitted)
    records = settings.records.model_dump(mode="json", exclude={"registry"}, exclude_defaults=True)
    return {**values, "records": records} if records else values


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values as canonical JSON, in hex."""
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()


# Loading: a YAML file and environment variables become checked settings, or an error that names every wrong key.
#
# Some configurations and the systemd files ship with the package: `streamlearn run --config packaged:quickstart`. A
# wheel holds them under `streamlearn/_data`; a source checkout has them in `configs/` and `systemd/` at its root.

PREFIX = "packaged:"
_PACKAGE = Path(__file__).parents[1]


def load(path: Path) -> Settings:
    """Read a configuration file, apply environment variables, check it and resolve its relative paths.

    `packaged:NAME` loads a configuration that ships with the package. Relative paths from the environment are then
    resolved against the current directory.

    Raises:
        ConfigError: the file cannot be read, or a key is wrong; names every wrong key and the nearest known one.
    """
    packaged = packaged_name(path)
    if packaged is not None:
        path = packaged_config(packaged)
    raw, folder = _read(path), folder_of(path)
    if packaged is not None:
        raw, folder = with_absolute_paths(raw, folder), Path.cwd()
    settings = checked(raw, folder, file=f"{path}")
    source = settings.source.jsonl
    dead = settings.dead_letter_file
    if source is not None and dead is not None and os.path.realpath(dead) == os.path.realpath(source.path):
        raise ConfigError(
            f"{path}: dead letters must not be written to source.jsonl.path, found {dead}: they would be read as "
            "records; set dead_letters.file to another file"
        )
    return settings


def _read(path: Path) -> dict[str, Any]:
    """The values of a file, not checked.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(raw).__name__}")
    return {key: value for key, value in raw.items() if not key.startswith("x-")}


def log_style(path: Path) -> LogStyle:
    """Return `log.style` of a configuration that cannot be used, from what can be read of it; by default auto."""
    values: dict[str, Any] = {}
    with suppress(ConfigError):
        values = _read(path) if path.is_file() else {}  # a pipe can be read once
    with suppress(ConfigError):
        names = [name for name in os.environ if name.upper().startswith(f"{ENV_PREFIX}LOG")]
        values = merged(values, Environment.read({name: os.environ[name] for name in names}, Settings).values)
    log = values.get("log")
    asked: Any = log.get("style") if isinstance(log, dict) else None
    style: LogStyle = asked if asked in get_args(LogStyle) else "auto"
    return style


def folder_of(path: Path) -> Path:
    """The folder that relative paths in a configuration start at: that of the file as it was named.

    Links are not followed: a Kubernetes ConfigMap's files are links into a folder that every update renames. Those of a
    pipe start at the current directory.
    """
    absolute = os.path.abspath(path)
    is_pipe = re.match(r"/dev/(stdin$|fd/)|/proc/.+/fd/", absolute)
    return Path.cwd() if is_pipe else Path(absolute).parent


def checked(values: Mapping[str, Any], folder: Path, *, file: str = "") -> Settings:
    """Check the values of a configuration, with those of the environment, and make its paths absolute from `folder`.

    Raises:
        ConfigError: a key is wrong; the line for each begins with `file`, or with the variable that set it.
    """
    environment = Environment.read(os.environ, Settings)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        found = [(environment.origin(path, line, file), line) for path, line in faults(error, Settings)]
        lines = [f"{origin}: {line}" if origin else line for origin, line in found]
        raise ConfigError("\n".join(lines)) from None  # it quotes what was found
    return _resolved(settings, folder)


def _resolved(settings: Settings, folder: Path) -> Settings:
    """Make relative paths absolute, starting at `folder`, without following links."""

    def absolute(path: str | Path) -> Path:
        try:
            return Path(os.path.abspath(folder / Path(path).expanduser()))
        except RuntimeError:
            raise ConfigError(f"{path}: the home directory is not known: set HOME, or write the whole path") from None

    def visit(section: BaseModel) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, Path):
                changed[name] = absolute(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Path):
                changed[name] = tuple(map(absolute, value))
            elif isinstance(value, Section):
                changed[name] = value.model_copy(update=visit(value))
        return changed

    changed = visit(settings)
    for name, key in (("backbone", "model"), ("adapter", "start")):
        section = getattr(settings, name)
        value = getattr(section, key)
        if value is not None and value.startswith(("./", "../", "/", "~")):
            changed[name] = section.model_copy(update={key: str(absolute(value))})
    return settings.model_copy(update=changed)


def packaged_folder(name: Literal["configs", "systemd"]) -> Path:
    """Return the folder of packaged files, in a wheel or in a checkout."""
    in_wheel = _PACKAGE / "_data" / name
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / name


def packaged_config(name: str) -> Path:
    """Return the path of a packaged configuration, for example `quickstart`.

    Raises:
        ConfigError: no packaged configuration has this name; the message lists those that exist.
    """
    folder = packaged_folder("configs")
    known = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in known:
        names = ", ".join(known) or f"none in {folder}"
        raise ConfigError(f"{PREFIX}{name}: expected the name of a packaged configuration ({names}), found {name!r}")
    return known[name]


def packaged_name(path: Path) -> str | None:
    """Return NAME of a path spelled `packaged:NAME`, or None for an ordinary path."""
    text = str(path)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else None


def with_absolute_paths(value: Any, folder: Path) -> Any:
    """Resolve the relative paths of a packaged configuration, which may lie in a folder that must not be written to.

    Files that ship in `folder` are read from there. A path that starts with `../` becomes what it would be if the
    configuration were `./configs/NAME.yaml`: `../build/quickstart` is `./build/quickstart` in the current directory.
    """
    if isinstance(value, dict):
        return {key: with_absolute_paths(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(inner, folder) for inner in value]
    if isinstance(value, str) and value.startswith("../"):
        return os.path.normpath(Path.cwd() / "configs" / value)
    return str(folder / value) if isinstance(value, str) and (folder / value).is_file() else value
