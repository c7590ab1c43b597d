"""Snapshots, HTTP and logging."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from streamlearn.settings.listen import ListenSettings
from streamlearn.settings.section import Section

Unknown = Literal["auto", "mean", "nearest", "backbone"]


TORCHRUN_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL of the other processes, after one of them failed; fixed in torch 2.13."""


class SnapshotSettings(Section):
    """When snapshots are written and how many are kept."""

    every_records: PositiveInt = 1000
    """Records between snapshots."""
    every_s: PositiveFloat = 300.0
    """Seconds between snapshots, if any record was trained on since the last one."""
    max_age_s: PositiveFloat = 3600.0
    """Maximum time that writes to the disk or the dead-letter topic may fail. Learning continues until then; after it
    the daemon stops with exit code 74. No data is lost: a restart resumes from the last snapshot."""
    keep: int = Field(default=3, ge=2)
    """Snapshots kept; at least two, because the newest may be damaged."""


class ServeSettings(ListenSettings):
    """The HTTP endpoint."""

    enabled: bool = True
    """Whether the endpoint is served."""
    port: int = Field(default=8083, ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    token_file: Path | None = None
    """File with the bearer token, at least 32 characters, readable by its owner only. When unset, http.token in the
    state folder, created at the first start."""
    require_token: bool = False
    """Require the token for every request but /livez, /readyz and the page's files; otherwise only to write a snapshot
    and for controls."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of a second listener for health probes, which serves only /livez and /readyz: plain HTTP, no token, any Host
    header. 0 takes a free port and logs it. Off when unset."""
    health_host: str = "0.0.0.0"  # noqa: S104 - probes come from other machines; the listener serves nothing but health
    """Address of the health listener."""
    queue_size: PositiveInt = 8
    """Maximum number of queued jobs; further requests get 503 with Retry-After."""
    eval_budget_s: PositiveFloat = 0.5
    """Maximum pause of training for jobs between two steps."""
    max_examples: PositiveInt = 1024
    """Maximum number of examples per evaluation request."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens per generation."""
    max_known_rejected: float = Field(default=0.01, gt=0.0, lt=1.0)
    """Share of requests of a known regime that may be taken for unknown; calibrated on the regimes' own records."""
    unknown: Unknown = "auto"
    """What answers requests that no regime explains: the mean of the regimes' adapters, the nearest regime, or the
    untouched backbone; auto compares their losses on the first records of new regimes, before anything is learned from
    them."""

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.enabled and self.health_port == self.port != 0:
            raise ValueError(f"health_port and port must differ, found {self.port} for both: set another health_port")
        return self

    @property
    def host_hint(self) -> str:
        """What to do when a Host header is refused."""
        return f"{super().host_hint}; for health probes set serve.health_port"

    @property
    def token_hint(self) -> str:
        """Where the token is found."""
        return f"{super().token_hint} (default STATE/http.token)"


class DistributedSettings(Section):
    """A run in several processes, which torchrun starts. In one process they have no effect."""

    timeout_s: float = Field(default=150.0, ge=40.0)
    """Maximum seconds until all processes have ended after one of them died or hangs. 30 of them are torchrun's,
    between SIGTERM and SIGKILL. Half of the others must exceed the longest step, probe or snapshot."""

    @property
    def wait_s(self) -> float:
        """Longest wait for another process, and longest time without a sign of life from the loop, in seconds."""
        return (self.timeout_s - TORCHRUN_GRACE_S) / 2


class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level."""
    style: Literal["auto", "json", "console"] = "auto"
    """Output format; auto is console on a terminal and JSON elsewhere."""
