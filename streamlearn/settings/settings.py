"""The whole configuration, and what of it a snapshot is bound to."""

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
from streamlearn.settings.service import LogSettings, ServeSettings, SnapshotSettings
from streamlearn.settings.source import DeadLetterSettings, SourceSettings, StreamSettings

ENV_PREFIX = "STREAMLEARN_"


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


WARMUP_TOKENS = {False: 10_000, True: 100_000}
"""CP-MoE (arXiv 2605.20247) section 4, by whether the backbone sees."""
FINGERPRINTED = ("seed", "stream", "shift", "backbone", "adapter", "learner", "probe", "consolidate", "holdout")
"""Sections that decide what a record does to the weights; the others may change between runs."""


def with_backbone_defaults(settings: Settings, *, is_vision: bool) -> Settings:
    """What was left open because it depends on the backbone; `sees`: it reads images."""
    tokens = settings.probe.warmup_tokens or WARMUP_TOKENS[is_vision]
    return settings.model_copy(update={"probe": settings.probe.model_copy(update={"warmup_tokens": tokens})})


def fingerprint(settings: Settings) -> dict[str, Any]:
    """The values of the fingerprinted sections, JSON-ready: what a snapshot's manifest keeps.

    The device is left out: a run may move to another machine, only not bit for bit.
    """
    return settings.model_dump(mode="json", include=set(FINGERPRINTED), exclude={"backbone": {"device"}})


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of canonical JSON, hex."""
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
