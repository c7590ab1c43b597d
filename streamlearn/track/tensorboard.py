"""TensorBoard event files, written with tensorboardX's record writer.

A file begins with the version of the format. A START of the session says that events of its step and later ones are
void, so a run that went back leaves no points of what was undone.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamlearn.errors import ConfigError
from streamlearn.track.track_error import TrackError
from streamlearn.track.tracked_sample import TrackedSample

_FILE_VERSION = "brain.Event:2"


class TensorBoardTracker:
    """One event file per process, and another after a failed write, whose end may be damaged."""

    name = "tensorboard"

    def __init__(self, folder: Path, wall: Callable[[], float]) -> None:
        """Check that the extra is installed.

        Raises:
            ConfigError: it is not.
        """
        self._folder = folder
        self._wall = wall
        self._records, self._events, self._summary = _library()
        self._writer: Any = None
        self._num_files = 0

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Write and flush; see `Tracker`."""
        try:
            if self._writer is None:
                self._open()
            for sample in samples:
                for event in self._events_of(sample):
                    self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError as error:
            self._abandon()
            raise TrackError(f"{self._folder} must be writable: {error.strerror or error}") from error

    def close(self, *, finished: bool) -> None:
        """Close the file. Safe to call twice."""
        del finished  # event files do not say
        self._abandon()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        now = self._wall()
        self._num_files += 1
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{self._num_files}.streamlearn"
        self._writer = self._records.RecordWriter(str(self._folder / name))
        version = self._events.Event(wall_time=now, file_version=_FILE_VERSION)
        self._writer.write(version.SerializeToString())

    def _events_of(self, sample: TrackedSample) -> Iterator[Any]:
        new = self._events.Event
        if sample.rewound_to is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            yield new(wall_time=sample.at, step=sample.rewound_to + 1, session_log=start)
        for point in sample.points:
            summary = self._summary.Summary(
                value=[self._summary.Summary.Value(tag=point.series, simple_value=point.value)]
            )
            yield new(wall_time=sample.at, step=point.step, summary=summary)
        for note in sample.notes:
            yield new(wall_time=sample.at, step=note.step, summary=self._summary.text(note.series, note.text))

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                raise TrackError(f"{self._folder} must be writable: {error.strerror or error}") from error


def _library() -> tuple[Any, Any, Any]:
    try:
        from tensorboardX import record_writer, summary  # noqa: PLC0415 - an optional dependency
        from tensorboardX.proto import event_pb2  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            "track.tensorboard needs package tensorboardX: pip install 'streamlearn[tensorboard]', or remove the key"
        ) from error
    return record_writer, event_pb2, summary
