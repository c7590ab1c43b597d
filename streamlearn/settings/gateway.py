"""The gateway. It has no configuration file: its command's options are these fields."""

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from streamlearn.settings.listen import ListenSettings
from streamlearn.settings.section import first_exposed, server_urls


class GatewaySettings(ListenSettings):
    """A gateway in front of model servers."""

    published: Path
    """The published folder."""
    upstreams: tuple[str, ...] = Field(min_length=1)
    """URLs of the model servers, without /v1."""
    port: int = Field(default=8084, ge=0, le=65535)
    """Port to bind; 0 takes a free port and logs it."""
    max_body_bytes: PositiveInt = 4 << 20
    """Maximum size of a request body."""
    upstream_token_file: Path | None = None
    """File with the bearer token of the upstreams, readable by its owner only."""
    allow_plaintext: bool = False
    """Whether that token may be sent over plain HTTP to other machines."""
    timeout_s: PositiveFloat = 600.0
    """Maximum time between two parts of an upstream's answer."""
    stop_timeout_s: PositiveFloat = 600.0
    """Maximum time for which a stopping gateway finishes requests."""

    @field_validator("upstreams")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return server_urls(value)

    @model_validator(mode="after")
    def _upstream_token_is_protected(self) -> Self:
        exposed = first_exposed(self.upstreams)
        if self.upstream_token_file is not None and exposed is not None and not self.allow_plaintext:
            raise ValueError(
                f"upstream_token_file is set, but {exposed} is plain HTTP to another machine: use https, or give "
                "--allow-plaintext"
            )
        return self

    def key(self, field: str) -> str:
        """The command's option."""
        option = {"names": "name", "upstreams": "upstream"}.get(field, field)
        return "--" + option.replace("_", "-")
