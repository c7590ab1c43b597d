"""The configuration: one frozen section per package, read from YAML, overridden by environment variables.

    source.kafka.bootstrap_servers   <-   STREAMLEARN_SOURCE__KAFKA__BOOTSTRAP_SERVERS

Keys may be spelled with dots instead of underscores, as Kafka's are (`bootstrap.servers`). An unknown key is an error
that suggests the nearest known one. Everything that can be checked without the model or the broker is checked here.
"""

from streamlearn.settings.learning import (
    Accumulation,
    AdapterSettings,
    BackboneSettings,
    Bias,
    ConsolidateSettings,
    HoldoutSettings,
    Importance,
    LearnerSettings,
    PresetName,
    ProbeSettings,
    Quantization,
    ShiftSettings,
)
from streamlearn.settings.records import RecordsSettings, RegistrySettings
from streamlearn.settings.section import section_type
from streamlearn.settings.serving import (
    DistributedSettings,
    GatewaySettings,
    HubSettings,
    ListenSettings,
    LogSettings,
    MlflowSettings,
    PublishSettings,
    ServeSettings,
    SnapshotSettings,
    TrackSettings,
    VllmSettings,
)
from streamlearn.settings.settings import Settings, digest, fingerprint, load, log_style, with_defaults
from streamlearn.settings.source import (
    DeadLetterSettings,
    JsonlSettings,
    KafkaSettings,
    SourceSettings,
    StreamSettings,
)

__all__ = [
    "Accumulation",
    "AdapterSettings",
    "BackboneSettings",
    "Bias",
    "ConsolidateSettings",
    "DeadLetterSettings",
    "DistributedSettings",
    "GatewaySettings",
    "HoldoutSettings",
    "HubSettings",
    "Importance",
    "JsonlSettings",
    "KafkaSettings",
    "LearnerSettings",
    "ListenSettings",
    "LogSettings",
    "MlflowSettings",
    "PresetName",
    "ProbeSettings",
    "PublishSettings",
    "Quantization",
    "RecordsSettings",
    "RegistrySettings",
    "ServeSettings",
    "Settings",
    "ShiftSettings",
    "SnapshotSettings",
    "SourceSettings",
    "StreamSettings",
    "TrackSettings",
    "VllmSettings",
    "digest",
    "fingerprint",
    "load",
    "log_style",
    "section_type",
    "with_defaults",
]
