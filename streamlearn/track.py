"""Samples that wait to be written: bounded, thread-safe."""

import math
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import httpx
import orjson

from streamlearn.errors import ConfigError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.settings import Settings, fingerprint
from streamlearn.settings.serving import MlflowSettings
from streamlearn.snapshot.files import Files
from streamlearn.status import AdaptationStatus, Board, Clock, Phase, ShiftStatus, Status, TrackerStatus


class Point(NamedTuple):
    """One value of a series."""

    series: str
    step: int
    value: float


class Note(NamedTuple):
    """Something that happened, for people."""

    series: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """What was new in the status."""

    step: int
    at: float
    """Unix time."""
    points: tuple[Point, ...] = ()
    notes: tuple[Note, ...] = ()
    rewound_to: int | None = None
    """The run went back to this step before: values of later steps that were written belong to what was undone."""

    def without_points(self, follower: Self) -> Self:
        """Merge into the next sample what must not be lost: notes and the mark of a rewind."""
        rewinds = [each.rewound_to for each in (self, follower) if each.rewound_to is not None]
        return replace(follower, notes=self.notes + follower.notes, rewound_to=min(rewinds) if rewinds else None)


MAX_SAMPLES = 2_000
"""When more wait, every other one is dropped, of later ones too: a long outage leaves a coarser series, not a gap."""
_MAX_NOTES = 200


class Backlog:
    """Oldest first. One thread adds, one takes."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._lock = threading.Lock()
        self._samples: list[TrackedSample] = []
        self._taken = 0
        self._every = 1
        self._count = 0
        self._carried: TrackedSample | None = None
        """Dropped since the last one that was kept: its notes and rewinds go to the next one."""
        self.dropped = 0
        """Samples whose points were dropped."""
        self.added = threading.Event()
        """Set by `add`; the thread that takes clears it."""

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: TrackedSample) -> None:
        """Append one; never blocks on anything but another `add` or `take`."""
        with self._lock:
            if not self._samples:
                self._every, self._count = 1, 0
            if self._count % self._every:
                self._drop(sample)
            else:
                self._samples.append(self._with_carried(sample))
            self._count += 1
            if len(self._samples) > self._max_samples:
                self._thin()
        self.added.set()

    def first(self, number: int) -> Sequence[TrackedSample]:
        """The oldest ones, which stay until `remove`."""
        with self._lock:
            self._taken = min(number, len(self._samples))
            return tuple(self._samples[: self._taken])

    def remove_first(self) -> None:
        """Remove what `first` returned: it was written."""
        with self._lock:
            del self._samples[: self._taken]
            self._taken = 0

    def _thin(self) -> None:
        """Drop every other sample that is not being written, and let half as many in."""
        waiting, kept = self._samples[self._taken :], []
        for number, sample in enumerate(waiting):
            if number % 2:
                self._drop(sample)
            else:
                kept.append(self._with_carried(sample))
        self._samples[self._taken :] = kept
        self._every *= 2

    def _drop(self, sample: TrackedSample) -> None:
        self.dropped += 1
        self._carried = self._with_carried(sample)

    def _with_carried(self, sample: TrackedSample) -> TrackedSample:
        carried, self._carried = self._carried, None
        if carried is None:
            return sample
        merged = carried.without_points(sample)
        return replace(merged, notes=merged.notes[-_MAX_NOTES:])


class TrackError(StreamlearnError):
    """A tracker cannot be written now; it is tried again."""


# The calls of MLflow's REST API (2.0) that a run needs.
#
# A server's answer and its absence both become a TrackError, except where the caller asks what is not there.


_EXISTS = "RESOURCE_ALREADY_EXISTS"
_ABSENT = "RESOURCE_DOES_NOT_EXIST"


class MlflowApi:
    """One connection. No proxy and no redirect: the token must not leave the server's address."""

    def __init__(
        self, settings: MlflowSettings, token: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._settings = settings
        self._client = httpx.Client(
            base_url=f"{settings.uri}/api/2.0/mlflow/",
            timeout=settings.timeout_s,
            trust_env=False,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            transport=transport,
        )

    def experiment_id(self, name: str) -> str:
        """The id of an experiment, which is created if it does not exist."""
        found = self._find_experiment(name)
        if found is None:
            created = self._call("POST", "experiments/create", {"name": name}, unless=_EXISTS)
            found = self._find_experiment(name) if created is None else str(created["experiment_id"])
        if found is None:
            raise TrackError(f"experiment {name!r} must exist: it was deleted; restore it, or name another")
        return found

    def find_run(self, experiment_id: str, tag: str, value: str) -> str | None:
        """The id of the run with this tag."""
        wanted = {"experiment_ids": [experiment_id], "filter": f"tags.`{tag}` = '{value}'", "max_results": 1}
        runs = (self._call("POST", "runs/search", wanted) or {}).get("runs", [])
        return str(runs[0]["info"]["run_id"]) if runs else None

    def create_run(self, experiment_id: str, name: str | None, tags: dict[str, str], start_ms: int) -> str:
        """Create a run and return its id."""
        wanted: dict[str, Any] = {
            "experiment_id": experiment_id,
            "start_time": start_ms,
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        if name is not None:
            wanted["run_name"] = name
        created = self._call("POST", "runs/create", wanted) or {}
        return str(created["run"]["info"]["run_id"])

    def set_status(self, run_id: str, status: str, end_ms: int | None = None) -> None:
        """Set a run's status: RUNNING, FINISHED or FAILED."""
        ended = {} if end_ms is None else {"end_time": end_ms}
        self._call("POST", "runs/update", {"run_id": run_id, "status": status, **ended})

    def log_batch(
        self,
        run_id: str,
        *,
        metrics: list[dict[str, Any]] | None = None,
        tags: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        """Log metrics, tags and parameters; at most 1000 in all, 100 of which are tags or parameters."""
        wanted = {
            "run_id": run_id,
            "metrics": metrics or [],
            "tags": [{"key": key, "value": value} for key, value in (tags or {}).items()],
            "params": [{"key": key, "value": value} for key, value in (params or {}).items()],
        }
        self._call("POST", "runs/log-batch", wanted)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._client.close()

    def _find_experiment(self, name: str) -> str | None:
        found = self._call("GET", "experiments/get-by-name", {"experiment_name": name}, unless=_ABSENT)
        return None if found is None else str(found["experiment"]["experiment_id"])

    def _call(self, method: str, path: str, wanted: dict[str, Any], *, unless: str = "") -> dict[str, Any] | None:
        """The answer; None if it is the error `unless`."""
        where = f"{self._settings.uri} ({path})"
        try:
            given: dict[str, Any] = {"params": wanted} if method == "GET" else {"json": wanted}
            answer = self._client.request(method, path, **given)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TrackError(f"{where}: an MLflow server must answer, found {error or type(error).__name__}") from error
        if answer.is_success and isinstance(body, dict):
            return body
        code = body.get("error_code", "") if isinstance(body, dict) else ""
        if unless and code == unless:
            return None
        message = body.get("message", "") if isinstance(body, dict) else ""
        raise TrackError(f"{where}: answered {answer.status_code} {code}: {message[:300]}")


NAME = "track.json"


class TrackFile:
    """The newest step that each tracker may have written, and what it calls the run. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read the file; without one the run is new.

        Raises:
            ConfigError: it is damaged.
        """
        self._path = folder / NAME
        self._files = Files()
        self._lock = threading.Lock()
        try:
            self._values: dict[str, Any] = orjson.loads(self._path.read_bytes())
            self.run = str(self._values["run"])
        except FileNotFoundError:
            self.run = uuid.uuid4().hex
            self._values = {"run": self.run}
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._path} must name the tracked run, found {error!r}: remove it, and a new run is begun"
            ) from error

    def get(self, tracker: str, key: str) -> Any:
        """A noted value; None if there is none."""
        with self._lock:
            return self._values.get(tracker, {}).get(key)

    def note(self, tracker: str, **values: Any) -> None:
        """Note values; durable when this returns. Raises OSError."""
        with self._lock:
            before = self._values.get(tracker, {})
            if before | values == before:
                return
            self._values[tracker] = before | values
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.replace(self._path, orjson.dumps(self._values))


def forget_run(folder: Path) -> None:
    """Begin a new run with the next start."""
    (folder / NAME).unlink(missing_ok=True)


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


# TensorBoard event files, written with tensorboardX's record writer.
#
# A file begins with the version of the format. A START of the session says that events of its step and later ones are
# void, so a run that went back leaves no points of what was undone.


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


class Tracker(Protocol):
    """Writes samples somewhere. Only its own thread calls it."""

    name: str

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Write samples, oldest first; may be called again with the same ones after an error.

        Raises:
            TrackError: they could not be written now.
        """

    def close(self, *, finished: bool) -> None:
        """Release everything; `finished` is whether the run ended as asked. Raises TrackError."""


class SeriesReader:
    """Knows what was read. A scoring or a shift is read once, however many statuses name it."""

    def __init__(self, last_step: int | None, wall: Callable[[], float]) -> None:
        """Begin after `last_step`, up to which an earlier process wrote; None if none did."""
        self._wall = wall
        self._step = -1 if last_step is None else last_step
        self._scored: dict[int, int] = {}
        self._since = self._step
        """Scorings and shifts up to this step were written before."""
        self._shifts: set[tuple[str, int]] | None = None

    def read(self, status: Status, rewound_to: int | None = None) -> TrackedSample | None:
        """What is new in a status; None if nothing is.

        Args:
            status: The newest one.
            rewound_to: The smallest step that the run went back to since the last call, if it did.
        """
        if status.step < self._step:
            rewound_to = status.step if rewound_to is None else min(rewound_to, status.step)
        if rewound_to is not None:
            self._rewind(rewound_to)
        points = [*self._scorings(status.adaptation)]
        notes = []
        for shift in self._new_shifts(status.adaptation):
            points.append(Point(f"shift/{shift.kind}", shift.step, shift.number))
            notes.append(Note(f"shift/{shift.kind}", shift.step, described(shift)))
        if status.step > self._step or rewound_to is not None:
            points += [Point(series, status.step, value) for series, value in _figures(status)]
            self._step = status.step
        if not points and not notes and rewound_to is None:
            return None
        finite = tuple(point for point in points if math.isfinite(point.value))
        return TrackedSample(status.step, self._wall(), finite, tuple(notes), rewound_to)

    def _rewind(self, step: int) -> None:
        self._step = self._since = min(step, self._step)
        self._scored = {regime: min(step, scored) for regime, scored in self._scored.items()}
        self._shifts = None

    def _scorings(self, adaptation: AdaptationStatus) -> Iterator[Point]:
        for regime in adaptation.regimes:
            before = self._scored.get(regime.number, self._since)
            for scoring in regime.history:
                if scoring.step > before:
                    yield Point(f"holdout_loss/regime_{regime.number}", scoring.step, scoring.loss)
                    yield Point(f"holdout_accuracy/regime_{regime.number}", scoring.step, scoring.accuracy)
                    self._scored[regime.number] = scoring.step

    def _new_shifts(self, adaptation: AdaptationStatus) -> list[ShiftStatus]:
        """Those that were not read; at the start and after a rewind, those of later steps."""
        if self._shifts is None:
            self._shifts = {(each.kind, each.number) for each in adaptation.shifts if each.step <= self._since}
        new = [each for each in adaptation.shifts if (each.kind, each.number) not in self._shifts]
        self._shifts = {(each.kind, each.number) for each in adaptation.shifts}
        return [each for each in new if each.kind != "inputs" or each.previous is not None]  # not the first regime


def described(shift: ShiftStatus) -> str:
    """A shift in one line."""
    came = f"regime {shift.previous} to {shift.regime}" if shift.previous is not None else f"regime {shift.regime}"
    known = "known" if shift.known else "new"
    return (
        f"{shift.kind} {shift.number}: {came} ({known}), declared at record {shift.declared_at}, onset {shift.onset}, "
        f"statistic {shift.statistic:.4g}, threshold {shift.threshold:.4g}"
    )


def _figures(status: Status) -> Iterator[tuple[str, float]]:
    adaptation = status.adaptation
    current = adaptation.current
    lags = [each.lag for each in status.partitions if each.lag is not None]
    found = {
        "loss/batch": status.loss,
        "loss/prequential": status.loss_smoothed,
        "tokens_per_s": status.tokens_per_s,
        "learning_rate": status.learning_rate,
        "lag": sum(lags) if lags else None,
        "records/trained": status.records_trained,
        "records/held_out": status.records_held_out,
        "records/dead_lettered": status.records_dead_lettered,
        "regimes/number": len(adaptation.regimes),
        "regimes/current": None if current is None else current.number,
        "forgetting/average_forgetting": adaptation.average_forgetting,
        "forgetting/backward_transfer": adaptation.backward_transfer,
    }
    if current is not None:
        found[f"prequential_loss/regime_{current.number}"] = current.prequential_loss
    yield from ((series, float(value)) for series, value in found.items() if value is not None)


_PORTION = 50
"""Samples that are written at a time."""
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
CLOSE_S = 5.0
"""A stop waits this long for what is pending; the rest is lost to the tracker."""

_log = get_logger("track")


class TrackerThread:
    """`add`, `status` and `close` may be called by another thread; none of them waits for the tracker but `close`."""

    def __init__(self, tracker: Tracker, notes: TrackFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = tracker
        self._notes = notes
        self._clock = clock
        self.last_step: int | None = notes.get(tracker.name, "last_step")
        """Up to this step an earlier process may have written."""
        self._backlog = Backlog()
        self._stopping = threading.Event()
        self._finished = False
        self._deadline = 0.0
        self._step: int | None = None
        self._failures = 0
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"track-{tracker.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, sample: TrackedSample) -> None:
        """Write this sample when its turn comes."""
        self._backlog.add(sample)

    @property
    def status(self) -> TrackerStatus:
        """What was written, what waits, and what is wrong."""
        return TrackerStatus(
            self._tracker.name, self._step, len(self._backlog), self._backlog.dropped, self._failures, self._fault
        )

    def close(self, *, finished: bool) -> None:
        """Write what is pending, for at most `CLOSE_S`, and end the thread. Safe to call twice."""
        self._finished = finished
        self._deadline = self._clock() + CLOSE_S
        self._stopping.set()
        self._backlog.added.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not (self._stopping.is_set() and (not len(self._backlog) or self._clock() > self._deadline)):
            self._backlog.added.wait()
            self._backlog.added.clear()
            while len(self._backlog):
                if self._attempt(self._write_portion):
                    backoff_s = _MIN_BACKOFF_S
                    continue
                if self._stopping.wait(backoff_s):
                    break
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if self._stopping.is_set() and len(self._backlog):
                break
        self._attempt(lambda: self._tracker.close(finished=self._finished))

    def _write_portion(self) -> None:
        """Note what may be written from here on, write it, and remove it from the backlog."""
        samples = self._backlog.first(_PORTION)
        self._notes.note(self._tracker.name, last_step=samples[-1].step)
        self._tracker.write(samples)
        self._backlog.remove_first()
        self._step = samples[-1].step

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do it; count and log a failure, whatever it is: training goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a tracker must not end or hold up the run
            self._failures += 1
            fault = str(error) or type(error).__name__
            if self._fault is None:
                _log.warning(Event.TRACKING_FAILED, tracker=self._tracker.name, fault=fault)
            self._fault = fault
            return False
        if self._fault is not None:
            _log.info(Event.TRACKING_RECOVERED, tracker=self._tracker.name, pending=len(self._backlog))
            self._fault = None
        return True


class Trackers:
    """The loop calls `note_rewind` and reads `status`, which wait for nothing."""

    def __init__(
        self, trackers: Sequence[Tracker], notes: TrackFile, interval_s: float, wall: Callable[[], float]
    ) -> None:
        self._threads = [TrackerThread(tracker, notes) for tracker in trackers]
        self._readers = [SeriesReader(thread.last_step, wall) for thread in self._threads]
        self._interval_s = interval_s
        self._board: Board | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._rewound_to: int | None = None
        self._thread = threading.Thread(target=self._work, name="track", daemon=True)

    def start(self, board: Board) -> None:
        """Read the board from now on."""
        self._board = board
        for thread in self._threads:
            thread.start()
        self._thread.start()

    def note_rewind(self, step: int) -> None:
        """The run went back to this step."""
        with self._lock:
            self._rewound_to = step if self._rewound_to is None else min(step, self._rewound_to)

    @property
    def status(self) -> tuple[TrackerStatus, ...]:
        """Of each tracker."""
        return tuple(thread.status for thread in self._threads)

    def close(self) -> None:
        """Read the board once more, and end every thread; blocks for seconds at most. Safe to call twice."""
        if self._board is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._sample()
        finished = self._board.read().phase is Phase.STOPPING
        for thread in self._threads:
            thread.close(finished=finished)

    def _work(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        assert self._board is not None
        with self._lock:
            rewound_to, self._rewound_to = self._rewound_to, None
            status = self._board.read()
        if status.phase in (Phase.STARTING, Phase.RESTORING):
            return
        for reader, thread in zip(self._readers, self._threads, strict=True):
            sample = reader.read(status, rewound_to)
            if sample is not None:
                thread.add(sample)


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
