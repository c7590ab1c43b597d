"""The gateway. It has no configuration file: its command's options are these fields."""

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from streamlearn.settings.listen import ListenSettings


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
    timeout_s: PositiveFloat = 600.0
    """Maximum time between two parts of an upstream's answer."""
    stop_timeout_s: PositiveFloat = 600.0
    """Maximum time for which a stopping gateway finishes requests."""

    @field_validator("upstreams")
    @classmethod
    def _urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
                raise ValueError(f"expected http://HOST:PORT or https://HOST:PORT without a path, found {url}")
        if len(set(value)) < len(value):
            raise ValueError(f"each upstream must be named once, found {', '.join(value)}")
        return value

    def key(self, field: str) -> str:
        """The command's option."""
        option = {"names": "name", "upstreams": "upstream"}.get(field, field)
        return "--" + option.replace("_", "-")
