"""The whole configuration: its sections, how it is loaded, and the part of it that a snapshot depends on."""

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import orjson
import yaml
from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from streamlearn.errors import ConfigError
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
from streamlearn.settings.section import Section, section_type
from streamlearn.settings.serving import (
    DistributedSettings,
    LogSettings,
    PublishSettings,
    ServeSettings,
    SnapshotSettings,
    TrackSettings,
)
from streamlearn.settings.source import DeadLetterSettings, SourceSettings, StreamSettings

ENV_PREFIX = "STREAMLEARN_"


class Settings(BaseSettings):
    """The sections and top-level keys of a configuration file."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

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
        """Environment variables, then the values that `load` read from YAML; no .env files, no secrets folder."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


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
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_fault(error)}") from None  # the error itself quotes the line
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(raw).__name__}")
    if packaged is not None:
        raw = with_absolute_paths(raw, path.resolve().parent)
    unknown = [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and not _env_name_is_known(name)]
    if unknown:
        raise ConfigError("\n".join(f"{name}: unknown environment variable, {_nearest_env(name)}" for name in unknown))
    settings = checked(raw, path.resolve().parent if packaged is None else Path.cwd(), name=f"{path}: ")
    if settings.source.jsonl is not None and settings.dead_letter_file == settings.source.jsonl.path:
        raise ConfigError(
            f"{path}: dead letters must not be written to source.jsonl.path, found {settings.dead_letter_file}: they "
            "would be read as records; set dead_letters.file to another file"
        )
    return settings


def checked(values: Mapping[str, Any], folder: Path, *, name: str = "") -> Settings:
    """Check the values of a configuration, with those of the environment, and make its paths absolute from `folder`.

    Raises:
        ConfigError: a key is wrong; a line for each begins with `name`.
    """
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{name}{line}" for line in explain(error))) from None  # it quotes what was found
    except SettingsError as error:
        raise ConfigError(f"expected JSON in the environment variable of a section or list: {error}") from None
    return _resolved(settings, folder)


def explain(error: ValidationError, *section: str) -> list[str]:
    """One line per fault of a configuration, or of a section: dotted key, what is wrong and was found, nearest key."""
    lines = []
    for fault in error.errors():
        location = [*section, *(part for part in fault["loc"] if isinstance(part, str))]
        key = ".".join(location)
        if fault["type"] == "extra_forbidden":
            *parents, name = location
            known = _section_keys(parents)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            options = f"did you mean {'.'.join([*parents, near[0]])}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"{key}: unknown key, {options}")
        elif fault["type"] == "missing":
            lines.append(f"{key}: required, but missing")
        else:
            value = fault["input"]
            scalar = isinstance(value, str | int | float | bool) and _may_be_shown(location)
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{key or 'configuration'}: {message}" + (f", found {value!r}" if scalar else ""))
    return lines


def _may_be_shown(location: list[str]) -> bool:
    """Whether a message may quote a wrong value: only one of a plain setting that is no secret."""
    *parents, name = location or [""]
    section = _section_model(parents)
    field = section.model_fields.get(name) if section else None
    return field is not None and section_type(field.annotation) is None and "password" not in name


def _fault(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """The fault and its place, without quoting the file: the text may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    steps = ((error.context, error.context_mark), (error.problem, error.problem_mark))
    return ", ".join(
        re.sub(r"'.+'|\".+\"", "...", text) + (f" in line {mark.line + 1}, column {mark.column + 1}" if mark else "")
        for text, mark in steps
        if text
    )


def _section_keys(path: list[str]) -> list[str]:
    model = _section_model(path)
    return list(model.model_fields) if model else []


def _section_model(path: list[str]) -> type[BaseModel] | None:
    model: type[BaseModel] = Settings
    for name in path:
        field = model.model_fields.get(name)
        inner = section_type(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


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
            return f"known keys: {', '.join(known) or 'none'}"
    return "which names a section, not a value"


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML in which dots in keys become underscores and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing duplicate keys."""
        seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True)).replace(".", "_")
            if key in seen:
                raise yaml.MarkedYAMLError(
                    f"first {key}", seen[key], f"duplicate key {key}; keep one", key_node.start_mark
                )
            seen[key] = key_node.start_mark
        values: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return {str(key).replace(".", "_"): value for key, value in values.items()}


def _resolved(settings: Settings, folder: Path) -> Settings:
    """Make relative paths absolute, starting at the configuration file's folder."""

    def visit(section: BaseModel) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, Path):
                changed[name] = (folder / value.expanduser()).resolve()
            elif isinstance(value, tuple) and value and isinstance(value[0], Path):
                changed[name] = tuple((folder / path.expanduser()).resolve() for path in value)
            elif isinstance(value, Section):
                changed[name] = value.model_copy(update=visit(value))
        return changed

    changed = visit(settings)
    for name, key in (("backbone", "model"), ("adapter", "start")):
        section = getattr(settings, name)
        value = getattr(section, key)
        if value is not None and value.startswith(("./", "../", "/", "~")):
            path = (folder / Path(value).expanduser()).resolve()
            changed[name] = section.model_copy(update={key: str(path)})
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
