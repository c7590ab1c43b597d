"""The configuration: one frozen section per room, read from YAML, overridden by the environment.

    source.kafka.bootstrap_servers   <-   STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS

Kafka's dotted names (`bootstrap.servers`) are accepted wherever an underscore stands. Unknown keys are refused with the
nearest known one, and everything that can be checked without the model or the broker is checked here.
"""

from streamlearn.settings.file import load
from streamlearn.settings.learning import (
    AdapterSettings,
    BackboneSettings,
    Bias,
    ConsolidateSettings,
    HoldoutSettings,
    LearnerSettings,
    ProbeSettings,
    ShiftSettings,
)
from streamlearn.settings.section import section_type
from streamlearn.settings.service import LogSettings, ServeSettings, SnapshotSettings
from streamlearn.settings.settings import Settings, digest, fingerprint, with_backbone_defaults
from streamlearn.settings.source import (
    DeadLetterSettings,
    JsonlSettings,
    KafkaSettings,
    SourceSettings,
    StreamSettings,
)

__all__ = [
    "AdapterSettings",
    "BackboneSettings",
    "Bias",
    "ConsolidateSettings",
    "DeadLetterSettings",
    "HoldoutSettings",
    "JsonlSettings",
    "KafkaSettings",
    "LearnerSettings",
    "LogSettings",
    "ProbeSettings",
    "ServeSettings",
    "Settings",
    "ShiftSettings",
    "SnapshotSettings",
    "SourceSettings",
    "StreamSettings",
    "digest",
    "fingerprint",
    "load",
    "section_type",
    "with_backbone_defaults",
]
