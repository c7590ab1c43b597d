"""The whole configuration, and the part of it that a snapshot depends on."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import NonNegativeInt, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

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
            if self.dead_letters.topic in self.source.kafka.topics:
                raise ValueError(
                    f"dead_letters.topic must not be one of source.kafka.topics, found {self.dead_letters.topic}: "
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
LEARNING_RATES = {False: 1e-4, True: 3e-3}
"""learner.lr by whether each regime has an adapter of its own; near the best of seven rates on development records of
six SuperNI tasks, for SmolLM2-135M and nano (one seed each)."""
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
    takes flushes from the journal. Offloading, sharding and activation checkpointing change no bit. Of the section
    records only what is set is stored.
    """
    omitted = {
        "backbone": {"device", "shard"},
        "stream": {"linger_s"},
        "adapter": {"max_in_memory"},
        "learner": {"activation_checkpointing"},
    }
    values = settings.model_dump(mode="json", include=set(FINGERPRINTED), exclude=omitted)
    records = settings.records.model_dump(mode="json", exclude={"registry"}, exclude_defaults=True)
    return {**values, "records": records} if records else values


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values as canonical JSON, in hex."""
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
