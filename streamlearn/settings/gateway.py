"""The gateway. It has no configuration file: its command's options are these fields."""

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

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
    timeout_s: PositiveFloat = 600.0
    """Maximum time between two parts of an upstream's answer."""
    stop_timeout_s: PositiveFloat = 600.0
    """Maximum time for which a stopping gateway finishes requests."""

    def key(self, field: str) -> str:
        """The command's option."""
        option = {"names": "name", "upstreams": "upstream"}.get(field, field)
        return "--" + option.replace("_", "-")
