"""Experiment trackers: a thread reads the published status and writes what is new to TensorBoard and MLflow.

Training never waits for a tracker. Samples of a failing one wait and are retried; the oldest are dropped when too
many wait. A run that goes back to an earlier step (a restart, a rollback) purges later points in TensorBoard; MLflow
cannot remove values, so its metric `rewinds` marks the step from which newer values replace older ones.
"""

import math
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from streamlearn.board import Board, Clock
from streamlearn.errors import ConfigError
from streamlearn.events import Event, get_logger
from streamlearn.http.guards import read_token
from streamlearn.settings import MlflowSettings, Settings, fingerprint
from streamlearn.snapshot.files import Files
from streamlearn.status import Phase, ShiftStatus, Status, TrackerStatus

MAX_SAMPLES = 2_000
"""Samples that wait for one tracker; the oldest are dropped."""
CLOSE_S = 5.0
"""A stop waits this long for pending writes."""
RUN_FILE = "track.run"
RUN_TAG = "streamlearn.run"
"""Tag of the MLflow run that this state folder continues."""
_MAX_METRICS = 900  # of the 1000 entities that one MLflow request may hold
_MAX_PARAMS = 100
_MAX_PARAM_CHARS = 500  # older MLflow servers refuse longer values
_NEWEST_SHIFTS = 20

_log = get_logger("track")


class Point(NamedTuple):
    """One value of a series."""

    series: str
    step: int
    value: float


class Note(NamedTuple):
    """A shift, in words."""

    series: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """New values in one published status."""

    step: int
    at: float
    """Unix time."""
    points: tuple[Point, ...] = ()
    notes: tuple[Note, ...] = ()
    rewound_to: int | None = None
    """The run went back to this step; values of later steps that were written before are void."""


class Tracker(Protocol):
    """Writes samples, in order. `write` may be repeated with the same samples after an exception."""

    name: str

    def write(self, samples: Sequence[Sample]) -> None: ...

    def close(self, *, finished: bool) -> None: ...


class TensorBoardTracker:
    """Event files, one per process and one more after each rewind or failure."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # noqa: PLC0415 - an optional dependency
        except ModuleNotFoundError as error:
            raise ConfigError(
                "track.tensorboard needs tensorboardX: pip install 'streamlearn[tensorboard]', or remove the key"
            ) from error
        self._folder = folder
        self._new_writer = SummaryWriter
        self._writer: Any = None
        self._num_files = 0

    def write(self, samples: Sequence[Sample]) -> None:
        try:
            for sample in samples:
                if self._writer is None or sample.rewound_to is not None:
                    self._open(sample.step if sample.rewound_to is None else sample.rewound_to + 1)
                for point in sample.points:
                    self._writer.add_scalar(point.series, point.value, point.step, sample.at)
                for note in sample.notes:
                    self._writer.add_text(note.series, note.text, note.step, sample.at)
            self._writer.flush()
        except OSError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Leave a file whose end may be damaged; `close` would begin with the write that has just failed."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.file_writer.event_writer._worker.stop()  # else a thread and a pipe would stay for each failure

    def close(self, *, finished: bool) -> None:
        del finished  # event files do not record it
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self, purge_step: int) -> None:
        self.close(finished=False)
        # max_queue 0: unbounded, so that a dead writer thread never blocks this one; `flush` raises what it met
        self._num_files += 1
        suffix = f".{os.getpid()}.{self._num_files}"  # a file's name has seconds only
        self._writer = self._new_writer(str(self._folder), purge_step=purge_step, max_queue=0, filename_suffix=suffix)


class MlflowTracker:
    """One MLflow run per state folder: restarts continue it, `run --fresh` begins another."""

    name = "mlflow"

    def __init__(self, settings: MlflowSettings, run: str, params: Mapping[str, str]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        try:
            from mlflow import MlflowClient  # noqa: PLC0415 - an optional dependency
        except ModuleNotFoundError as error:
            raise ConfigError(
                "track.mlflow needs mlflow-skinny: pip install 'streamlearn[mlflow]', or remove the key"
            ) from error
        # The client takes these from the environment only.
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(math.ceil(settings.timeout_s))
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # this module retries
        token = None if settings.token_file is None else read_token(settings.token_file, min_chars=1)
        if token is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = token
        self._settings = settings
        self._new_client = MlflowClient
        self._client: Any = None
        self._run = run
        self._params = params
        self._run_id: str | None = None
        self._continued_at: int | None = None
        self._shifts: deque[str] = deque(maxlen=_NEWEST_SHIFTS)

    def write(self, samples: Sequence[Sample]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 - an optional dependency

        run_id = self._run_id or self._open(samples[0].step)
        metrics = []
        for sample in samples:
            at_ms = int(sample.at * 1000)
            rewound_to, self._continued_at = sample.rewound_to or self._continued_at, None
            if rewound_to is not None:
                metrics.append(Metric("rewinds", 1.0, at_ms, rewound_to))
            metrics += [Metric(point.series, point.value, at_ms, point.step) for point in sample.points]
        portions = iter(metrics)
        while portion := list(islice(portions, _MAX_METRICS)):
            self._client.log_batch(run_id, metrics=portion)
        lines = [f"step {note.step}: {note.text}" for sample in samples for note in sample.notes]
        if lines:
            shifts = deque([*self._shifts, *lines], _NEWEST_SHIFTS)
            self._client.set_tag(run_id, "shifts", "\n".join(reversed(shifts))[:5000])
            self._shifts = shifts

    def close(self, *, finished: bool) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")

    def _open(self, step: int) -> str:
        """Continue the run of this state folder, or begin it."""
        from mlflow.entities import Param  # noqa: PLC0415 - an optional dependency

        self._client = self._client or self._new_client(tracking_uri=self._settings.uri)
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._settings.experiment)
        runs = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{self._run}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._continued_at = step
        else:
            tags = {RUN_TAG: self._run, "mlflow.source.name": "streamlearn"}
            self._run_id = self._client.create_run(number, tags=tags, run_name=self._settings.run_name).info.run_id
            params = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in islice(self._params.items(), _MAX_PARAMS)]
            self._client.log_batch(self._run_id, params=params)
        assert self._run_id is not None
        return self._run_id


class SeriesReader:
    """Extracts from each status what earlier ones did not have."""

    def __init__(self, wall: Callable[[], float], *, continued: bool = False) -> None:
        """`continued`: an earlier process wrote what the first status already has."""
        self._wall = wall
        self._step = -1
        self._written_until: int | None = None if continued else -1
        self._scored: dict[int, int] = {}
        self._shifts: dict[tuple[str, int], int] = {}

    def read(self, status: Status, rewound_to: int | None = None) -> Sample | None:
        """New values, or None; `rewound_to` is the smallest step that the run went back to since the last call."""
        if self._written_until is None:
            self._written_until = status.step - 1
        if status.step < self._step and (rewound_to is None or status.step < rewound_to):
            rewound_to = status.step
        if rewound_to is not None:
            self._step = min(rewound_to, self._step)
            self._written_until = min(rewound_to, self._written_until)
            self._scored = {regime: min(rewound_to, step) for regime, step in self._scored.items()}
            self._shifts = {key: step for key, step in self._shifts.items() if step <= rewound_to}
        points = list(self._scores(status, self._written_until))
        shifts = self._new_shifts(status, self._written_until)
        points += [Point(f"shift/{shift.kind}", shift.step, shift.number) for shift in shifts]
        notes = tuple(Note(f"shift/{shift.kind}", shift.step, described(shift)) for shift in shifts)
        if status.step > self._step or rewound_to is not None:
            points += [Point(series, status.step, value) for series, value in _values(status)]
            self._step = status.step
        if not points and not notes and rewound_to is None:
            return None
        finite = tuple(point for point in points if math.isfinite(point.value))
        return Sample(status.step, self._wall(), finite, notes, rewound_to)

    def _scores(self, status: Status, written_until: int) -> Iterator[Point]:
        for regime in status.adaptation.regimes:
            before = self._scored.get(regime.number, written_until)
            for score in regime.history:
                if score.step > before:
                    yield Point(f"holdout_loss/regime_{regime.number}", score.step, score.loss)
                    yield Point(f"holdout_accuracy/regime_{regime.number}", score.step, score.accuracy)
                    self._scored[regime.number] = score.step

    def _new_shifts(self, status: Status, written_until: int) -> list[ShiftStatus]:
        new = [
            shift
            for shift in status.adaptation.shifts
            if (shift.kind, shift.number) not in self._shifts and shift.step > written_until
        ]
        self._shifts |= {(shift.kind, shift.number): shift.step for shift in new}
        return [shift for shift in new if shift.kind != "inputs" or shift.previous is not None]  # not the first regime


class Trackers:
    """The thread and its trackers. The loop calls `note_rewind` and reads `status`; neither waits."""

    def __init__(self, trackers: Sequence[Tracker], reader: SeriesReader, interval_s: float) -> None:
        self._queues = [_Queue(tracker) for tracker in trackers]
        self._reader = reader
        self._interval_s = interval_s
        self._board: Board | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._rewound_to: int | None = None
        self._thread = threading.Thread(target=self._work, name="track", daemon=True)

    def start(self, board: Board) -> None:
        """Read the board from now on."""
        self._board = board
        self._thread.start()

    def note_rewind(self, step: int) -> None:
        """Record that the run went back to `step`."""
        with self._lock:
            self._rewound_to = step if self._rewound_to is None else min(step, self._rewound_to)

    @property
    def status(self) -> tuple[TrackerStatus, ...]:
        """Of each tracker."""
        return tuple(queue.status for queue in self._queues)

    def close(self) -> None:
        """Write the last status and end the thread; blocks for `CLOSE_S` at most. Safe to call twice."""
        if self._board is not None and not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        assert self._board is not None
        while not self._stopping.wait(self._interval_s):
            self._sample(self._board)
        self._sample(self._board)
        finished = self._board.read().phase is Phase.STOPPING
        for queue in self._queues:
            queue.attempt(lambda tracker: tracker.close(finished=finished))

    def _sample(self, board: Board) -> None:
        with self._lock:
            status = board.read()
            if status.phase in (Phase.STARTING, Phase.RESTORING):
                return
            rewound_to, self._rewound_to = self._rewound_to, None
        sample = self._reader.read(status, rewound_to)
        for queue in self._queues:
            if sample is not None:
                queue.add(sample)
            queue.write()


class _Queue:
    """Samples that wait for one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._samples: deque[Sample] = deque()
        self.status = TrackerStatus(tracker.name)

    def add(self, sample: Sample) -> None:
        if len(self._samples) == MAX_SAMPLES:
            oldest = self._samples.popleft()
            self.status = replace(self.status, dropped=self.status.dropped + 1)
            if oldest.rewound_to is not None:  # the mark of a rewind must not be lost
                rewinds = [step for step in (oldest.rewound_to, self._samples[0].rewound_to) if step is not None]
                self._samples[0] = replace(self._samples[0], rewound_to=min(rewinds))
        self._samples.append(sample)
        self.status = replace(self.status, pending=len(self._samples))

    def write(self) -> None:
        samples = tuple(self._samples)
        if samples and self.attempt(lambda tracker: tracker.write(samples)):
            self._samples.clear()
            self.status = replace(self.status, step=samples[-1].step, pending=0)

    def attempt(self, work: Callable[[Tracker], None]) -> bool:
        """Do it; count and log a failure, whatever it is: training goes on."""
        status = self.status
        try:
            work(self._tracker)
        except Exception as error:  # noqa: BLE001 - a tracker must not end or hold up the run
            fault = str(error) or type(error).__name__
            if status.fault is None:
                _log.warning(Event.TRACKING_FAILED, tracker=self._tracker.name, fault=fault)
            self.status = replace(status, failures=status.failures + 1, fault=fault)
            return False
        if status.fault is not None:
            _log.info(Event.TRACKING_RECOVERED, tracker=self._tracker.name)
            self.status = replace(status, fault=None)
        return True


def described(shift: ShiftStatus) -> str:
    """A shift in one line."""
    regimes = f"regime {shift.previous} to {shift.regime}" if shift.previous is not None else f"regime {shift.regime}"
    known = "known" if shift.known else "new"
    probe = ""
    if shift.probe_losses is not None:
        first, last = shift.probe_losses
        probe = f", probe loss {first:.4g} to {last:.4g}{' (failed)' if shift.probe_failed else ''}"
        probe += f", mean CKA {shift.mean_similarity:.4g}"
    return (
        f"{shift.kind} {shift.number}: {regimes} ({known}), declared at record {shift.declared_at}, "
        f"onset {shift.onset}, statistic {shift.statistic:.4g}, threshold {shift.threshold:.4g}{probe}"
    )


def open_trackers(settings: Settings, clock: Clock | None = None) -> Trackers | None:
    """Return the trackers of the section `track`; None without one. Connects to nothing yet.

    Raises:
        ConfigError: an extra is not installed, or a named file cannot be read.
    """
    track = settings.track
    if track is None:
        return None
    continued = (settings.state / RUN_FILE).exists()
    trackers = _trackers(settings, _run(settings.state))
    return Trackers(trackers, SeriesReader((clock or Clock()).wall, continued=continued), track.interval_s)


def check(settings: Settings) -> None:
    """Check what `open_trackers` needs, before any weight is loaded. Raises what it raises."""
    _trackers(settings, "")
    if settings.track is not None and (settings.state / RUN_FILE).exists():
        _run(settings.state)


def forget_run(folder: Path) -> None:
    """Begin a new MLflow run with the next start."""
    (folder / RUN_FILE).unlink(missing_ok=True)


def _trackers(settings: Settings, run: str) -> list[Tracker]:
    trackers: list[Tracker] = []
    if settings.track is not None and settings.track.tensorboard is not None:
        trackers.append(TensorBoardTracker(settings.track.tensorboard))
    if settings.track is not None and settings.track.mlflow is not None:
        trackers.append(MlflowTracker(settings.track.mlflow, run, dict(_flat(fingerprint(settings)))))
    return trackers


def _run(folder: Path) -> str:
    """The identifier of the tracked run, created at the first start."""
    path = folder / RUN_FILE
    try:
        return uuid.UUID(hex=path.read_text(encoding="utf-8").strip()).hex
    except FileNotFoundError:
        run = uuid.uuid4().hex
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        Files().replace(path, run.encode())
        return run
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must name the tracked run, found {error}: remove it to begin a new run") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _values(status: Status) -> Iterator[tuple[str, float]]:
    adaptation = status.adaptation
    current = adaptation.current
    lags = [partition.lag for partition in status.partitions if partition.lag is not None]
    values = {
        "loss/batch": status.loss,
        "loss/prequential": status.loss_smoothed,
        "tokens_per_s": status.tokens_per_s,
        "learning_rate": status.learning_rate,
        "lag": sum(lags) if lags else None,
        "records/trained": status.records_trained,
        "records/held_out": status.records_held_out,
        "records/dead_lettered": status.records_dead_lettered,
        "records/ignored": status.records_ignored,
        "regimes/number": len(adaptation.regimes),
        "regimes/current": None if current is None else current.number,
        "forgetting/average_forgetting": adaptation.average_forgetting,
        "forgetting/backward_transfer": adaptation.backward_transfer,
    }
    if current is not None:
        values[f"prequential_loss/regime_{current.number}"] = current.prequential_loss
    yield from ((series, float(value)) for series, value in values.items() if value is not None)
