"""Durable state, HTTP, logging."""

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from streamlearn.settings.section import Section, is_loopback


class SnapshotSettings(Section):
    """When state goes to disk, and how much is kept."""

    every_records: PositiveInt = 1000
    """Records between snapshots."""
    every_s: PositiveFloat = 300.0
    """Seconds between snapshots, when something was trained since."""
    max_age_s: PositiveFloat = 3600.0
    """Seconds that the disk or the dead-letter topic may refuse what must be written; learning goes on meanwhile, then
    the daemon stops with exit code 74. Nothing is lost: a restart goes on from the last snapshot."""
    keep: int = Field(default=3, ge=2)
    """Snapshots kept; the newest may be damaged, so at least two."""


class ServeSettings(Section):
    """The local HTTP endpoint."""

    enabled: bool = True
    """Whether it is served."""
    host: str = "127.0.0.1"
    """Address to bind; one that is not loopback needs token_file, tls_certfile and tls_keyfile."""
    port: int = Field(default=8083, ge=0, le=65535)
    """Port to bind; 0 takes a free one, which the log names."""
    names: tuple[str, ...] = ()
    """Further names that a request's Host header may hold, for an address that is not loopback."""
    token_file: Path | None = None
    """File with the bearer token, at least 32 characters, readable by its owner alone; unless given, http.token in the
    state folder, made at the first start."""
    require_token: bool = False
    """Whether every request but /livez and /readyz needs the token; unless set, only one that writes a snapshot."""
    tls_certfile: Path | None = None
    """PEM certificate chain; with tls_keyfile the endpoint speaks HTTPS."""
    tls_keyfile: Path | None = None
    """PEM key of the certificate."""
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

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Self:
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ValueError("tls_certfile and tls_keyfile belong together: set both or neither")
        if not is_loopback(self.host) and (self.token_file is None or self.tls_certfile is None):
            raise ValueError(
                f"host {self.host} is not a loopback address: set token_file, tls_certfile and tls_keyfile, or bind "
                "127.0.0.1"
            )
        return self

    @property
    def open_to_others(self) -> bool:
        """Whether other machines may ask."""
        return not is_loopback(self.host)


class LogSettings(Section):
    """Events on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""
    style: Literal["auto", "json", "console"] = "auto"
    """auto is console on a terminal, JSON elsewhere."""
