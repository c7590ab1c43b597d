"""Where an HTTP endpoint listens, and whom it answers."""

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from streamlearn.settings.section import Section, host_name, is_loopback


class ListenSettings(Section):
    """An HTTP endpoint."""

    host: str = "127.0.0.1"
    """Address to bind; any other than loopback requires token_file, tls_certfile and tls_keyfile."""
    port: int = Field(ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    names: tuple[str, ...] = ()
    """Further names accepted in the Host header, with any port, for an address other than loopback."""
    token_file: Path | None = None
    """File with the bearer token, at least 32 characters, readable by its owner only."""
    require_token: bool = False
    """Require the token for every request but /livez and /readyz."""
    tls_certfile: Path | None = None
    """PEM certificate chain; set with tls_keyfile to serve HTTPS."""
    tls_keyfile: Path | None = None
    """PEM private key of the certificate."""
    max_body_bytes: PositiveInt = 1 << 20
    """Maximum size of a request body."""

    @field_validator("names")
    @classmethod
    def _comparable(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host_name(each) for each in names)

    @model_validator(mode="after")
    def _protected_from_other_machines(self) -> Self:
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
        """Whether other machines can connect."""
        return not is_loopback(self.host)

    def key(self, field: str) -> str:
        """How the operator sets a field, for messages."""
        return f"serve.{field}"

    @property
    def host_hint(self) -> str:
        """What to do when a Host header is refused."""
        return f"use http://127.0.0.1, or add the name to {self.key('names')}"

    @property
    def token_hint(self) -> str:
        """Where the token is found."""
        return f"send 'Authorization: Bearer TOKEN' with the token in {self.key('token_file')}"
