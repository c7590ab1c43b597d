"""A run of an MLflow server."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from streamlearn.track.mlflow_api import MlflowApi
from streamlearn.track.track_file import TrackFile
from streamlearn.track.tracked_sample import Note, TrackedSample

RUN_TAG = "streamlearn.run"
"""Names the run of the daemon, so that a restart finds the MLflow run even if its id was not noted."""
_MAX_METRICS = 900  # of the 1000 entities that one request may hold
_MAX_PARAMS = 100
_MAX_VALUE_CHARS = 500
"""Of a parameter; older servers refuse longer ones."""
_NEWEST_NOTES = 20


class MlflowTracker:
    """Metrics are series; what happened is in tags, the newest lines first.

    MLflow cannot remove values. After a rewind the metric `rewinds` has a value at the step that the run went back to,
    and the tag `rewinds` says from where: values of later steps that are older belong to what was undone.
    """

    name = "mlflow"

    def __init__(
        self,
        api: MlflowApi,
        notes: TrackFile,
        *,
        experiment: str,
        run_name: str | None,
        params: Mapping[str, str],
        wall: Callable[[], float],
    ) -> None:
        self._api = api
        self._notes = notes
        self._experiment = experiment
        self._run_name = run_name
        self._params = params
        self._wall = wall
        self._run_id: str | None = None
        self._shifts: deque[str] = deque(notes.get(self.name, "shifts") or (), _NEWEST_NOTES)
        self._rewinds: list[str] = list(notes.get(self.name, "rewinds") or ())

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Log the samples' metrics, then the tags; see `Tracker`."""
        run_id = self._run_id = self._run_id or self._open()
        metrics = iter([metric for sample in samples for metric in self._metrics(sample)])
        while portion := list(islice(metrics, _MAX_METRICS)):
            self._api.log_batch(run_id, metrics=portion)
        shifts = [_line(note) for sample in samples for note in sample.notes]
        rewinds = [
            f"back to step {sample.rewound_to}; values of later steps that were logged before are undone"
            for sample in samples
            if sample.rewound_to is not None
        ]
        if shifts or rewinds:
            newest = deque((*self._shifts, *shifts), _NEWEST_NOTES)
            tags = {"shifts": "\n".join(reversed(newest)), "rewinds": "\n".join([*self._rewinds, *rewinds][-50:])}
            self._api.log_batch(run_id, tags={key: value[:5000] for key, value in tags.items() if value})
            self._shifts, self._rewinds = newest, [*self._rewinds, *rewinds][-50:]
            self._notes.note(self.name, shifts=list(self._shifts), rewinds=self._rewinds)

    def close(self, *, finished: bool) -> None:
        """Say that the run has ended; a restart continues it."""
        try:
            if self._run_id is not None:
                status = "FINISHED" if finished else "FAILED"
                self._api.set_status(self._run_id, status, _milliseconds(self._wall()))
        finally:
            self._api.close()

    def _open(self) -> str:
        """Continue the run that this state folder began, or begin it."""
        experiment = self._api.experiment_id(self._experiment)
        run_id = self._api.find_run(experiment, RUN_TAG, self._notes.run)
        if run_id is None:
            tags = {RUN_TAG: self._notes.run, "mlflow.source.name": "streamlearn"}
            run_id = self._api.create_run(experiment, self._run_name, tags, _milliseconds(self._wall()))
            params = {key: value[:_MAX_VALUE_CHARS] for key, value in islice(self._params.items(), _MAX_PARAMS)}
            self._api.log_batch(run_id, params=params)
        else:
            self._api.set_status(run_id, "RUNNING")
        self._notes.note(self.name, run_id=run_id, experiment=self._experiment)
        return run_id

    def _metrics(self, sample: TrackedSample) -> Iterator[dict[str, Any]]:
        at = _milliseconds(sample.at)
        if sample.rewound_to is not None:
            yield {"key": "rewinds", "value": 1.0, "timestamp": at, "step": sample.rewound_to}
        for point in sample.points:
            yield {"key": point.series, "value": point.value, "timestamp": at, "step": point.step}


def _line(note: Note) -> str:
    return f"step {note.step}: {note.text}"


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
