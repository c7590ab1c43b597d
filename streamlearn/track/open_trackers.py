"""Opening of the configured trackers."""

from collections.abc import Iterator, Mapping
from typing import Any

from streamlearn.errors import ConfigError
from streamlearn.settings import Settings, fingerprint
from streamlearn.settings.track import MlflowSettings
from streamlearn.status.board import Clock
from streamlearn.track.mlflow import MlflowTracker
from streamlearn.track.mlflow_api import MlflowApi
from streamlearn.track.tensorboard import TensorBoardTracker
from streamlearn.track.track_file import TrackFile
from streamlearn.track.tracker import Tracker
from streamlearn.track.trackers import Trackers


def open_trackers(settings: Settings, clock: Clock | None = None) -> Trackers | None:
    """Return the trackers of the section `track`; None without one. Nothing is written or connected to yet.

    Raises:
        ConfigError: an extra is not installed, or a file that is named cannot be read.
    """
    track = settings.track
    if track is None:
        return None
    wall = (clock or Clock()).wall
    notes = TrackFile(settings.state)
    found: list[Tracker] = []
    if track.tensorboard is not None:
        found.append(TensorBoardTracker(track.tensorboard, wall))
    if track.mlflow is not None:
        found.append(
            MlflowTracker(
                MlflowApi(track.mlflow, _token(track.mlflow)),
                notes,
                experiment=track.mlflow.experiment,
                run_name=track.mlflow.run_name,
                params=dict(_flat(fingerprint(settings))),
                wall=wall,
            )
        )
    return Trackers(found, notes, track.interval_s, wall)


def check(settings: Settings) -> None:
    """Check what `open_trackers` needs, before any weight is loaded. Raises what it raises."""
    if settings.track is not None and settings.track.tensorboard is not None:
        TensorBoardTracker(settings.track.tensorboard, Clock().wall)
    if settings.track is not None and settings.track.mlflow is not None:
        _token(settings.track.mlflow)


def _token(settings: MlflowSettings) -> str | None:
    if settings.token_file is None:
        return None
    try:
        return settings.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"track.mlflow.token_file {settings.token_file} must be readable: {error}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
