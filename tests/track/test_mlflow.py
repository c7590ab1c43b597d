"""A run of MLflow's REST API: begun once, continued by a restart, and retried without repeating a value."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from streamlearn.settings import MlflowSettings
from streamlearn.track import MlflowApi, MlflowTracker, Note, Point, TrackedSample, TrackError, TrackFile

from .mlflow_stub import MlflowStub


def tracker(folder: Path, stub: MlflowStub, **settings: Any) -> MlflowTracker:
    own = MlflowSettings(uri="http://127.0.0.1:5000/", experiment="mine", run_name="first", **settings)
    return MlflowTracker(
        MlflowApi(own, "secret-token", transport=stub),
        TrackFile(folder),
        experiment=own.experiment,
        run_name=own.run_name,
        params={"learner.lr": "0.003"},
        wall=lambda: 17.0,
    )


def sample(step: int, rewound_to: int | None = None) -> TrackedSample:
    notes = (Note("shift/inputs", step, f"shift at {step}"),)
    return TrackedSample(step, 17.5, (Point("loss/batch", step, 2.0),), notes, rewound_to)


def test_a_run_has_its_series_parameters_and_shifts(tmp_path: Path) -> None:
    stub = MlflowStub()
    mlflow = tracker(tmp_path, stub)
    mlflow.write([sample(3), sample(4)])
    mlflow.close(finished=True)
    [run] = stub.runs.values()
    assert run["metrics"] == [
        {"key": "loss/batch", "value": 2.0, "timestamp": 17_500, "step": 3},
        {"key": "loss/batch", "value": 2.0, "timestamp": 17_500, "step": 4},
    ]
    assert (run["name"], run["status"], run["params"]) == ("first", "FINISHED", {"learner.lr": "0.003"})
    assert run["tags"]["shifts"] == "step 4: shift at 4\nstep 3: shift at 3"
    assert stub.authorization == "Bearer secret-token"


def test_a_restart_continues_the_run(tmp_path: Path) -> None:
    """And a failed one says so."""
    stub = MlflowStub()
    first = tracker(tmp_path, stub)
    first.write([sample(3)])
    first.close(finished=False)
    assert [run["status"] for run in stub.runs.values()] == ["FAILED"]
    second = tracker(tmp_path, stub)
    second.write([sample(4)])
    [run] = stub.runs.values()
    assert run["status"] == "RUNNING"
    assert [metric["step"] for metric in run["metrics"]] == [3, 4]
    assert run["tags"]["shifts"].count("\n") == 1
    second.close(finished=True)


def test_a_rewind_is_marked(tmp_path: Path) -> None:
    stub = MlflowStub()
    mlflow = tracker(tmp_path, stub)
    mlflow.write([sample(9), sample(4, rewound_to=4)])
    mlflow.close(finished=True)
    [run] = stub.runs.values()
    assert {"key": "rewinds", "value": 1.0, "timestamp": 17_500, "step": 4} in run["metrics"]
    assert run["tags"]["rewinds"].startswith("back to step 4;")


def test_a_lost_answer_creates_no_second_run_and_no_second_value(tmp_path: Path) -> None:
    """Each call may have taken effect although its answer was lost."""
    stub = MlflowStub()
    mlflow = tracker(tmp_path, stub)
    for _ in range(12):
        stub.lost = 1
        with pytest.raises(TrackError, match="an MLflow server must answer"):
            mlflow.write([sample(3)])
        stub.lost = 0
    mlflow.write([sample(3)])
    mlflow.close(finished=True)
    [run] = stub.runs.values()
    assert len(run["metrics"]) == 1


def test_a_server_that_is_away_is_an_error_and_later_gets_everything(tmp_path: Path) -> None:
    stub = MlflowStub()
    stub.down = True
    mlflow = tracker(tmp_path, stub)
    with pytest.raises(TrackError, match=r"http://127\.0\.0\.1:5000 \(experiments/get-by-name\)"):
        mlflow.write([sample(3)])
    stub.down = False
    mlflow.write([TrackedSample(step, 17.5, (Point("loss/batch", step, 1.0),)) for step in range(2_500)])
    mlflow.close(finished=True)
    [run] = stub.runs.values()
    assert len(run["metrics"]) == 2_500


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"uri": "sqlite:///mlflow.db"}, "expected a server's URL"),
        ({"uri": "http://me:word@127.0.0.1:5000"}, "without password"),
        ({"uri": "http://mlflow.example", "token_file": "t"}, "plain HTTP to another machine"),
    ],
)
def test_an_address_that_cannot_work_or_leaks_the_token_is_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MlflowSettings(**values)
