"""The history as HTTP returns it, and what the OpenAPI document says of every view."""

from dataclasses import replace

import httpx2
import orjson

from streamlearn.history import BackbonePair, History
from streamlearn.serve.models import (
    RENDER_EVERY_S,
    history_body,
)
from tests.history.outcomes import STATUS, HandClock, history_of, outcome, scored, shift
from tests.serve.doubles import RUNNING, Daemon


def test_points_are_columns_of_means() -> None:
    """Sums divided by what they are over; null where that is nothing."""
    hand = HandClock()
    history = History(hand.clock)
    history.add(outcome(1, shifts=(shift(1, 1),)), scored())
    history.add_pair(BackbonePair(2, 10, 20.0, 30.0))
    hand.now = 4.0
    history.add(outcome(2, step=None), STATUS)
    points = orjson.loads(history_body(history.status))["points"]
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
