"""Durable state, HTTP, logging."""

from typing import Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from streamlearn.settings.section import Section, is_loopback


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
        if not is_loopback(host):
            raise ValueError(f"{host} is not a loopback address: the endpoint has no authentication, bind 127.0.0.1")
        return host


class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""
    style: Literal["auto", "json", "console"] = "auto"
    """auto is console on a terminal, JSON elsewhere."""
