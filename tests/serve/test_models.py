"""Request bodies and responses, and whether the OpenAPI document matches the server."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from pydantic import BaseModel, ValidationError

from streamlearn.history import BackbonePair, History
from streamlearn.serve.models import (
    RENDER_EVERY_S,
    EvalRequest,
    HistoryView,
    JobsView,
    RouteRequest,
    history_body,
    regimes_view,
    shifts_view,
    status_view,
)
from streamlearn.status import Board, HistoryStatus, SnapshotStatus
from tests.history.outcomes import STATUS, HandClock, history_of, outcome, scored, shift
from tests.serve.doubles import ADAPTATION, AUTHORIZED, RUNNING, Daemon, Time, row

JOBS = JobsView(waiting=1, capacity=2)


def test_the_age_of_a_snapshot_is_never_negative() -> None:
    """The wall clock may have been set back since it was written."""
    time = Time()
    future = SnapshotStatus("a", step=1, written_at=time.wall + 60)
    view = status_view(Board(replace(RUNNING, snapshot=future), time.clock()), JOBS, time.clock())
    assert view.last_snapshot is not None
    assert view.last_snapshot.age_s == 0.0


def test_a_degraded_daemon_is_ready_and_says_what_it_cannot_write() -> None:
    time = Time()
    view = status_view(Board(replace(RUNNING, degraded="snapshots: disk full"), time.clock()), JOBS, time.clock())
    assert (view.ready, view.reason, view.degraded, view.jobs) == (True, None, "snapshots: disk full", JOBS)


def test_regimes_that_were_never_scored_have_no_loss() -> None:
    view = status_view(Board(RUNNING, Time().clock()), JOBS, Time().clock())
    assert view.forgetting.loss_by_regime == {"1": 1.25}
    assert [regime.number for regime in regimes_view(RUNNING).regimes] == [1, 3]


def test_the_first_regime_is_listed_and_not_counted() -> None:
    """The total is the published count, not the length of the list, which starts with the first regime."""
    first_only = replace(ADAPTATION, shifts=ADAPTATION.shifts[:1], num_shifts={})
    view = shifts_view(replace(RUNNING, adaptation=first_only))
    assert (view.total, len(view.shifts), view.shifts[0].previous) == ({"inputs": 0, "answers": 0}, 1, None)


def view(history: HistoryStatus) -> HistoryView:
    return HistoryView.model_validate(orjson.loads(history_body(history)))


def test_points_are_columns_of_means() -> None:
    """Sums divided by what they are over; null where that is nothing."""
    hand = HandClock()
    history = History(hand.clock)
    history.add(outcome(1, shifts=(shift(1, 1),)), scored())
    history.add_pair(BackbonePair(2, 10, 20.0, 30.0))
    hand.now = 4.0
    history.add(outcome(2, step=None), STATUS)
    points = view(history.status).points
    assert (points["record"], points["step"], points["loss"]) == ([4, 8], [1, 2], [3.0, None])
    assert (points["sample_loss"], points["backbone_loss"], points["sample_records"]) == (
        [2.0, None],
        [3.0, None],
        [2, 0],
    )
    assert (points["tokens_per_s"], points["step_seconds"]) == ([80.0, 0.0], [0.5, 0.0])
    assert not points.keys() & {"loss_sum", "elapsed_s"}


def test_a_body_that_the_client_has_is_not_sent_again(daemon: Daemon, client: httpx2.Client) -> None:
    """It is rendered again at most once a second."""
    history = history_of(200)
    daemon.board.publish(replace(RUNNING, history=history.status))
    daemon.time.monotonic += RENDER_EVERY_S
    whole = client.get("/v1/history")
    known = {"if-none-match": whole.headers["etag"]}
    assert whole.json()["points"]["step"][-1] == 200
    history.add(outcome(201), STATUS)
    daemon.board.publish(replace(RUNNING, history=history.status))
    same = client.get("/v1/history", headers=known)
    assert (same.status_code, same.content) == (304, b"")
    daemon.time.monotonic += RENDER_EVERY_S
    after = client.get("/v1/history", headers=known)
    assert (after.status_code, after.json()["points"]["step"][-1]) == (200, 201)


def test_only_the_last_segment_goes_on() -> None:
    """The others have a row of the accuracy matrix."""
    segments = view(history_of(25).status).segments
    assert [(each.regime, each.ended, each.accuracy) for each in segments] == [
        (1, True, {"1": 0.5, "2": 0.25}),
        (2, True, {"1": 0.5, "2": 0.25}),
        (3, False, {}),
    ]


@pytest.mark.parametrize("number", [True, "3", 0, -1, 1.5, None])
def test_a_number_of_tokens_is_a_positive_integer(number: Any) -> None:
    """A string or a boolean is not converted; null means the configured maximum."""
    body = {"examples": [{"text": "a"}], "max_new_tokens": number}
    if number is None:
        assert EvalRequest.model_validate(body).max_new_tokens is None
    else:
        with pytest.raises(ValidationError, match="max_new_tokens"):
            EvalRequest.model_validate(body)


@pytest.mark.parametrize("model", [EvalRequest, RouteRequest])
def test_the_documented_examples_are_valid(model: type[BaseModel]) -> None:
    for example in model.model_json_schema()["examples"]:
        model.model_validate(example)


def test_every_field_is_described(client: httpx2.Client) -> None:
    """The OpenAPI document takes the descriptions from the docstrings, also those of inherited fields."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = {
        f"{name}.{field}": value
        for name, schema in schemas.items()
        for field, value in schema.get("properties", {}).items()
        if "$ref" not in value and not name.endswith("ValidationError")
    }
    assert [name for name, value in fields.items() if "description" not in value] == []
    assert {"StatusView.records_trained", "RegimesView.average_forgetting"} < fields.keys()
    assert set(schemas["StatusView"]["properties"]) == set(schemas["StatusView"]["required"])


MAX_EXAMPLES = 5  # per operation; 300 take a minute and find nothing more


def test_every_described_request_is_answered_as_described(daemon: Daemon, tmp_path: Path) -> None:
    daemon.rows = (row(40), row(41))
    program = Path(sys.executable).with_name("st")
    [(name, value)] = AUTHORIZED.items()
    command = [str(program), "run", f"http://127.0.0.1:{daemon.server.port}/openapi.json", "-H", f"{name}: {value}"]
    options = ["--max-examples", str(MAX_EXAMPLES), "--seed", "1", "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "Tested: 25" in done.stdout
