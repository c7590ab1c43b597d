"""Experiment trackers that get the run's series."""

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator, model_validator

from streamlearn.settings.section import Section, first_exposed


class MlflowSettings(Section):
    """An MLflow tracking server, written to by its REST API."""

    uri: str
    """URL of the server, such as http://127.0.0.1:5000."""
    experiment: str = Field(default="streamlearn", min_length=1)
    """Name of the experiment; created if it does not exist."""
    run_name: str | None = None
    """Name of the run; MLflow chooses one if unset. A restart continues the same run, --fresh begins another."""
    token_file: Path | None = None
    """File with a bearer token."""
    allow_plaintext: bool = False
    """Whether the token may be sent over plain HTTP to another machine."""
    timeout_s: PositiveFloat = 10.0
    """Maximum time of a request, seconds. Training never waits for one."""

    @field_validator("uri")
    @classmethod
    def _is_url(cls, uri: str) -> str:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"expected a server's URL such as http://127.0.0.1:5000, without password, found {uri}")
        return uri.rstrip("/")

    @model_validator(mode="after")
    def _token_is_protected(self) -> Self:
        exposed = first_exposed([self.uri])
        if self.token_file is not None and exposed is not None and not self.allow_plaintext:
            raise ValueError(
                f"token_file is set, but {self.uri} is plain HTTP to another machine: use https, or set "
                "allow_plaintext: true"
            )
        return self


class TrackSettings(Section):
    """Where the run's series are written besides /metrics: loss, forgetting, throughput, lag, regimes and shifts."""

    tensorboard: Path | None = None
    """Folder of TensorBoard event files, relative to the configuration file; needs the extra tensorboard."""
    mlflow: MlflowSettings | None = None
    """MLflow server."""
    interval_s: PositiveFloat = 5.0
    """Interval at which the published status is read, seconds. Hold-out scorings and shifts in between are written
    too."""
