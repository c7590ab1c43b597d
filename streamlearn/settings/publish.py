"""How what was learned reaches other programs: a folder, vLLM servers, a Hugging Face repository."""

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from streamlearn.settings.section import Section, first_exposed, server_urls


class VllmSettings(Section):
    """vLLM servers that load and unload adapters while they run (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)."""

    replicas: tuple[str, ...] = Field(min_length=1)
    """Their URLs, such as http://10.0.0.5:8000."""
    folder: str | None = None
    """Where the replicas find publish.folder, if its path is another one there."""
    token_file: Path | None = None
    """File with the key that the replicas expect (vllm serve --api-key)."""
    allow_plaintext: bool = False
    """Whether the key may be sent over plain HTTP to other machines."""
    timeout_s: PositiveFloat = 60.0
    """Maximum time for a replica to load an adapter, seconds."""
    interval_s: PositiveFloat = 5.0
    """Interval at which replicas are asked what they have loaded, seconds; one that was away gets what it lacks."""
    drain_s: PositiveFloat = 30.0
    """Time after which a version that was replaced is unloaded, seconds: requests that began before may still use
    it."""

    @field_validator("replicas")
    @classmethod
    def _urls(cls, replicas: tuple[str, ...]) -> tuple[str, ...]:
        return server_urls(replicas)

    @model_validator(mode="after")
    def _key_is_protected(self) -> Self:
        exposed = first_exposed(self.replicas)
        if self.token_file is not None and exposed is not None and not self.allow_plaintext:
            raise ValueError(
                f"token_file is set, but {exposed} is plain HTTP to another machine: use https, or set "
                "allow_plaintext: true"
            )
        return self


class HubSettings(Section):
    """A repository on the Hugging Face hub, which gets each publication as one commit."""

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Its id, owner/name; created if it does not exist."""
    token_file: Path
    """File with a token that may write to it, readable by its owner only."""
    private: bool = True
    """Whether it is created as a private repository."""


class PublishSettings(Section):
    """Publication of regimes as plain LoRAs, after each snapshot.

    Needs a preset with one expert per head and one adapter per regime, such as streamlearn.
    """

    folder: Path
    """Folder of the publication, relative to the configuration file; the gateway reads it, and so do the replicas."""
    name: str = Field(default="streamlearn", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """First part of every version's name: NAME-regime-3@184 is regime 3 after 184 updates."""
    base_model: str | None = None
    """Name under which the replicas serve the untouched backbone, another one than name; by default its hub id or
    folder."""
    level: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Level of the paired test on the hold-out records: probability at which a version that is no worse is held back.
    The higher, the smaller the damage that is noticed."""
    min_holdout_records: PositiveInt = 5
    """Hold-out records that a regime must have before its first version is published."""
    time_share: float = Field(default=0.05, gt=0.0, le=0.5)
    """Maximum fraction of training time spent on scoring new versions; idle time does not count."""
    keep: PositiveInt = 2
    """Versions of each regime kept in the folder, the published one among them."""
    vllm: VllmSettings | None = None
    """Servers that load new versions."""
    hub: HubSettings | None = None
    """Repository that gets a copy."""

    @model_validator(mode="after")
    def _test_can_fail(self) -> Self:
        smallest = 0.5**self.min_holdout_records
        if smallest > self.level:
            raise ValueError(
                f"min_holdout_records {self.min_holdout_records} cannot show at level {self.level} that a version is "
                f"worse: the smallest p-value is {smallest:g}; set more records or a higher level"
            )
        return self
