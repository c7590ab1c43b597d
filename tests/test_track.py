"""Trackers: every value once and at its own step; a tracker that fails or hangs holds nothing up."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from streamlearn import track
from streamlearn.board import Board, Clock
from streamlearn.errors import ConfigError
from streamlearn.settings import MlflowSettings
from streamlearn.status import AdaptationStatus, PartitionStatus, Phase, RegimeStatus, Scoring, ShiftStatus, Status
from streamlearn.track import MlflowTracker, Note, Point, Sample, SeriesReader, TensorBoardTracker, Tracker, Trackers

SHIFT = ShiftStatus("inputs", 1, 2, False, 1, 40, 38, 0.5, 0.2, None, None, 10, 100, 0.1, None)


def status(step: int, *scores: Scoring, shifts: Sequence[ShiftStatus] = ()) -> Status:
    """A run in its second regime; `scores` are of the first one's hold-out records."""
    regimes = (RegimeStatus(1, 0, history=tuple(scores)), RegimeStatus(2, 1, current=True, prequential_loss=1.5))
    return replace(
        Status(Phase.RUNNING, step=step, loss=2.0, loss_smoothed=2.5, learning_rate=0.003, tokens_per_s=90.0),
        adaptation=AdaptationStatus(regimes, tuple(shifts), average_forgetting=0.25),
        partitions=(PartitionStatus("t", 0, 8, 3), PartitionStatus("t", 1, 8, 4)),
    )


def reader(*, continued: bool = False) -> SeriesReader:
    return SeriesReader(lambda: 17.0, continued=continued)


def values(sample: Sample | None) -> dict[str, tuple[int, float]]:
    assert sample is not None
    return {point.series: (point.step, point.value) for point in sample.points}


def test_every_value_of_a_status_is_a_series() -> None:
    """Values that are not known or not finite are left out."""
    assert values(reader().read(status(12))) == {
        "loss/batch": (12, 2.0),
        "loss/prequential": (12, 2.5),
        "tokens_per_s": (12, 90.0),
        "learning_rate": (12, 0.003),
        "lag": (12, 7.0),
        "records/trained": (12, 0.0),
        "records/held_out": (12, 0.0),
        "records/dead_lettered": (12, 0.0),
        "records/ignored": (12, 0.0),
        "regimes/number": (12, 2.0),
        "regimes/current": (12, 2.0),
        "prequential_loss/regime_2": (12, 1.5),
        "forgetting/average_forgetting": (12, 0.25),
    }
    assert "loss/batch" not in values(reader().read(replace(status(3), loss=float("nan"))))


def test_each_score_and_shift_is_read_once_at_its_own_step() -> None:
    """However many happened between two readings; a status without news gives nothing."""
    series = reader()
    series.read(status(5))
    first, second = Scoring(6, 3.0, 0.4), Scoring(9, 2.9, 0.5)
    sample = series.read(status(12, first, second, shifts=[SHIFT]))
    assert sample is not None
    assert [point for point in sample.points if point.series == "holdout_loss/regime_1"] == [
        Point("holdout_loss/regime_1", 6, 3.0),
        Point("holdout_loss/regime_1", 9, 2.9),
    ]
    assert values(sample)["shift/inputs"] == (10, 1.0)
    [note] = sample.notes
    assert note.text.startswith("inputs 1: regime 1 to 2 (new), declared at record 40, onset 38, statistic 0.5")
    assert series.read(status(12, first, second, shifts=[SHIFT])) is None
    later = series.read(status(13, first, second, replace(second, step=13), shifts=[SHIFT]))
    assert values(later)["holdout_loss/regime_1"] == (13, 2.9)
    assert "shift/inputs" not in values(later)


def test_a_step_that_goes_back_is_marked_and_written_again() -> None:
    """Also when the step has already passed the old one at the next reading."""
    series, score = reader(), Scoring(9, 3.0, 0.4)
    series.read(status(12, score, shifts=[SHIFT]))
    back = series.read(status(8))
    assert back is not None
    assert back.rewound_to == 8
    assert values(back)["loss/batch"] == (8, 2.0)
    assert {"holdout_loss/regime_1", "shift/inputs"} <= values(series.read(status(12, score, shifts=[SHIFT]))).keys()
    passed = series.read(status(15), rewound_to=8)
    assert passed is not None
    assert passed.rewound_to == 8
    sample = reader(continued=True).read(status(13, score, Scoring(13, 2.9, 0.5), shifts=[SHIFT]))
    assert values(sample)["holdout_loss/regime_1"] == (13, 2.9), "a restart does not repeat what is written already"
    assert "shift/inputs" not in values(sample)


class ListTracker:
    """Keeps what is written; fails the first `failures` times."""

    name = "list"

    def __init__(self, failures: int = 0) -> None:
        self.samples: list[Sample] = []
        self.failures = failures
        self.finished: bool | None = None

    def write(self, samples: Sequence[Sample]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the server must answer")
        self.samples += samples

    def close(self, *, finished: bool) -> None:
        self.finished = finished


def started(*trackers: Tracker) -> tuple[Trackers, Board]:
    board = Board(Status(Phase.STARTING), Clock())
    opened = Trackers(trackers, reader(), 0.01)
    opened.start(board)
    return opened, board


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_published_status_is_written_and_so_is_the_last_one() -> None:
    tracker = ListTracker()
    trackers, board = started(tracker)
    board.publish(status(3))
    wait_for(lambda: len(tracker.samples) == 1)
    wait_for(lambda: trackers.status[0].step == 3)
    trackers._interval_s = 60.0
    board.publish(Status(Phase.STOPPING, step=9))
    trackers.close()
    trackers.close()
    assert [sample.step for sample in tracker.samples] == [3, 9]
    assert tracker.finished


def test_failures_are_counted_and_waiting_samples_are_written_later_in_order() -> None:
    tracker = ListTracker(failures=3)
    trackers, board = started(tracker)
    for step in range(1, 4):
        board.publish(status(step))
        time.sleep(0.02)
    wait_for(lambda: bool(tracker.samples) and not trackers.status[0].pending)
    assert trackers.status[0].failures == 3
    assert trackers.status[0].fault is None
    trackers.close()
    steps = [sample.step for sample in tracker.samples]
    assert steps == sorted(set(steps))


def test_when_too_many_wait_the_oldest_are_dropped_and_a_rewind_stays_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "MAX_SAMPLES", 2)
    queue, tracker = track._Queue(down := ListTracker(failures=99)), down
    for sample in (Sample(5, 0.0, rewound_to=4), Sample(6, 0.0), Sample(7, 0.0), Sample(8, 0.0)):
        queue.add(sample)
        queue.write()
    assert (queue.status.dropped, queue.status.pending) == (2, 2)
    tracker.failures = 0
    queue.write()
    assert [(sample.step, sample.rewound_to) for sample in tracker.samples] == [(7, 4), (8, None)]


def test_a_tracker_that_hangs_does_not_hold_up_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "CLOSE_S", 0.2)
    entered, released = threading.Event(), threading.Event()

    class HungTracker(ListTracker):
        def write(self, samples: Sequence[Sample]) -> None:
            entered.set()
            released.wait(60)

    trackers, board = started(HungTracker())
    board.publish(status(1))
    assert entered.wait(30)
    before = time.monotonic()
    trackers.close()
    assert time.monotonic() - before < 10.0
    released.set()


# TensorBoard


def events(folder: Path) -> list[Any]:
    """Every event of every file, read with tensorboardX's own protocol buffers."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    read = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            read.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return read


def test_tensorboard_gets_points_at_their_steps_and_a_rewind_voids_later_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    tracker = TensorBoardTracker(tmp_path)
    tracker.write([Sample(12, 17.5, (Point("loss/batch", 12, 2.0),))])
    note = Note("shift/inputs", 8, "inputs 1: regime 1 to 2")
    tracker.write([Sample(8, 18.0, (Point("loss/batch", 8, 2.5),), (note,), rewound_to=8)])

    tracker.close(finished=True)
    tracker.close(finished=True)
    written = events(tmp_path)
    points = [(event.step, event.summary.value[0].tag) for event in written if event.summary.value]
    assert sorted(points) == [(8, "loss/batch"), (8, "shift/inputs/text_summary"), (12, "loss/batch")]
    assert sorted(event.step for event in written if event.HasField("session_log")) == [9, 12]


def test_an_unwritable_event_file_is_an_error_and_the_next_write_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    tracker = TensorBoardTracker(tmp_path)
    tracker.write([Sample(12, 17.5)])

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker._writer, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        tracker.write([Sample(9, 19.0)])
    tracker.write([Sample(9, 19.0)])  # begins another file
    tracker.close(finished=True)
    assert len(list(tmp_path.iterdir())) == 2
    left = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboardX")]
    assert not left, "each failure would leave one"


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensorboardX", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'streamlearn\[tensorboard\]"):
        TensorBoardTracker(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'streamlearn\[mlflow\]"):
        MlflowTracker(MlflowSettings(uri="http://127.0.0.1:5000"), "", {})


# MLflow


class MlflowServer(ThreadingHTTPServer):
    """The calls of MLflow's REST API that a run uses, in memory; `down` refuses them."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.authorizations: set[str | None] = set()
        self.down = False
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: MlflowServer

    def do_GET(self) -> None:
        self._answer({key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.authorizations.add(self.headers["authorization"])
        call = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
        answer = {"error_code": "TEMPORARILY_UNAVAILABLE"} if self.server.down else self._call(call, body)
        data = json.dumps(answer).encode()
        self.send_response(503 if self.server.down else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _call(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        runs = self.server.runs
        if call == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "1", "name": "mine", "lifecycle_stage": "active"}}
        if call == "runs/create":
            run: dict[str, Any] = {
                "status": "RUNNING",
                "metrics": [],
                "tags": {},
                "params": {},
                "name": body.get("run_name"),
            }
            runs[f"run{len(runs)}"] = run
            run["tags"] = {tag["key"]: tag["value"] for tag in body["tags"]}
            return {"run": _run(list(runs)[-1])}
        if call == "runs/search":
            tag = body["filter"].partition("'")[2].rstrip("'")
            return {"runs": [_run(name) for name, run in runs.items() if tag in run["tags"].values()]}
        run = runs[body["run_id"]]
        if call == "runs/update":
            run["status"] = body["status"]
            return {"run_info": _run(body["run_id"])["info"]}
        if call == "runs/set-tag":
            run["tags"][body["key"]] = body["value"]
        if call == "runs/log-batch":
            assert len(body.get("metrics", [])) + len(body.get("params", [])) <= 1000
            run["metrics"] += [(metric["key"], metric["step"], metric["value"]) for metric in body.get("metrics", [])]
            run["params"] |= {param["key"]: param["value"] for param in body.get("params", [])}
        return {"run": _run(body["run_id"])}

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _run(name: str) -> dict[str, Any]:
    info = {"run_id": name, "run_uuid": name, "experiment_id": "1", "status": "RUNNING", "lifecycle_stage": "active"}
    return {"info": {**info, "artifact_uri": "", "user_id": "", "start_time": 0}, "data": {}}


@pytest.fixture
def mlflow_server() -> Iterator[MlflowServer]:
    pytest.importorskip("mlflow")
    with MlflowServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def mlflow(server: MlflowServer, folder: Path) -> MlflowTracker:
    token = folder / "token"
    token.write_text("secret-token")
    token.chmod(0o600)
    uri = f"http://127.0.0.1:{server.server_port}"
    settings = MlflowSettings(uri=uri, experiment="mine", run_name="first", token_file=token)
    return MlflowTracker(settings, "id-of-the-run", {"learner.lr": "0.003"})


def point(step: int, rewound_to: int | None = None) -> Sample:
    notes = (Note("shift/inputs", step, f"shift at {step}"),)
    return Sample(step, 17.5, (Point("loss/batch", step, 2.0),), notes, rewound_to)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")


def test_mlflow_has_one_run_that_a_restart_continues_and_marks(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    tracker = mlflow(mlflow_server, tmp_path)
    mlflow_server.down = True
    with pytest.raises(Exception, match="503"):
        tracker.write([point(3)])
    mlflow_server.down = False
    tracker.write([point(3), point(4)])
    tracker.close(finished=False)
    [run] = mlflow_server.runs.values()
    assert run["metrics"] == [("loss/batch", 3, 2.0), ("loss/batch", 4, 2.0)]
    assert (run["name"], run["status"], run["params"]) == ("first", "FAILED", {"learner.lr": "0.003"})
    assert run["tags"]["shifts"] == "step 4: shift at 4\nstep 3: shift at 3"
    again = mlflow(mlflow_server, tmp_path)
    again.write([point(4)])
    again.write([point(9), point(6, rewound_to=6)])
    [run] = mlflow_server.runs.values()
    assert run["status"] == "RUNNING"
    assert [metric for metric in run["metrics"] if metric[0] == "rewinds"] == [("rewinds", 4, 1.0), ("rewinds", 6, 1.0)]
    again.write([Sample(step, 17.5, (Point("lag", step, 1.0),)) for step in range(2_500)])  # in several requests
    assert len([metric for metric in run["metrics"] if metric[0] == "lag"]) == 2_500
    again.close(finished=True)
    assert run["status"] == "FINISHED"
    assert mlflow_server.authorizations == {"Bearer secret-token"}


def test_an_address_that_leaks_the_token_is_refused() -> None:
    for uri in ("http://me:word@127.0.0.1:5000", "http://127.0.0.1:5000/?token=word"):
        with pytest.raises(ValidationError, match="without a password or a query") as refused:
            MlflowSettings(uri=uri)
        assert "word" not in refused.value.errors()[0]["msg"].replace("password", "")
    with pytest.raises(ValidationError, match="plain HTTP to another machine"):
        MlflowSettings(uri="http://mlflow.example", token_file=Path("token"))
