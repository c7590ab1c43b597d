"""/v1/history: the whole of it, and what changed since a cursor."""

from dataclasses import replace

import httpx
from streamlearn.cli.watch import HistoryCopy

from streamlearn.history import BackbonePair, History
from streamlearn.serve.models import HistoryView, history_view
from streamlearn.status import SnapshotStatus
from tests.history.outcomes import PER_BATCH, STATUS, HandClock, history_of, outcome, scored, shift
from tests.serve.doubles import RUNNING, Daemon


def test_points_are_columns_of_means() -> None:
    """Sums divided by what they are over; null where that is nothing."""
    hand = HandClock()
    history = History(hand.clock)
    history.add(outcome(1, shifts=(shift(1, 1),)), scored())
    history.add_pair(BackbonePair(2, 10, 20.0, 30.0))
    hand.now = 4.0
    history.add(outcome(2, step=None), STATUS)
    points = history_view(history.status, None).points
    assert (points.record, points.step, points.loss) == ([4, 8], [1, 2], [3.0, None])
    assert (points.sample_loss, points.backbone_loss, points.sample_records) == ([2.0, None], [3.0, None], [2, 0])
    assert (points.tokens_per_s, points.step_seconds) == ([80.0, 0.0], [0.5, 0.0])
    assert {len(getattr(points, name)) for name in type(points).model_fields} == {2}


def test_a_copy_that_is_kept_up_to_date_equals_the_whole() -> None:
    """While rows are joined behind it, and whatever was missed between two answers."""
    history, copy = history_of(50), HistoryCopy()
    for number in range(51, 700):
        history.add(outcome(number, (number % 50,) * PER_BATCH, shifts=()), scored(0.5))
        if number % 60 == 0:
            history.add(
                outcome(number, (number,) * PER_BATCH, shifts=(shift(number, number * PER_BATCH),)), scored(0.5)
            )
        if number % 31 == 0:
            history.add_pair(BackbonePair(1, 5, 1.0, 2.0))
        if number % 13 == 0 or number == 699:
            since = copy.path.partition("since=")[2] or None
            copy.update(history_view(history.status, since).model_dump_json().encode())
    whole = history_view(history.status, None)
    assert (copy.points.step[-20:], copy.points.loss[-20:]) == (whole.points.step[-20:], whole.points.loss[-20:])
    assert sum(copy.points.batches) == sum(whole.points.batches)
    assert sum(copy.points.sample_records) == sum(whole.points.sample_records)
    assert copy.segments == list(whole.segments)
    assert copy.dead_letters == list(whole.dead_letters)


def test_an_answer_at_the_newest_cursor_is_empty(daemon: Daemon, client: httpx.Client) -> None:
    """And one after a batch holds that batch."""
    history = history_of(200)
    daemon.board.publish(replace(RUNNING, history=history.status))
    whole = client.get("/v1/history").json()
    assert whole["complete"]
    same = client.get("/v1/history", params={"since": whole["cursor"]}).json()
    assert not same["complete"]
    assert (same["points"]["step"], same["segments"], same["dead_letters"], same["snapshots"]) == ([], [], [], [])
    history.add(outcome(201), STATUS)
    history.add_snapshot(SnapshotStatus("00000201", 201, 5.0), 804)
    daemon.board.publish(replace(RUNNING, history=history.status))
    after = client.get("/v1/history", params={"since": whole["cursor"]}).json()
    assert after["points"]["step"] == [201]
    assert [each["last_record"] for each in after["segments"]] == [804]
    assert [each["name"] for each in after["snapshots"]] == ["00000201"]


def test_a_cursor_that_means_nothing_gets_all(daemon: Daemon, client: httpx.Client) -> None:
    """Of an earlier process, of before a rollback, of a later revision, or none at all."""
    history = history_of(5)
    daemon.board.publish(replace(RUNNING, history=history.status))
    origin, _, revision = client.get("/v1/history").json()["cursor"].partition("-")
    for cursor in ("", "nonsense", f"1-{revision}", f"{origin}-{int(revision) + 1}", f"{origin}-x"):
        answer = client.get("/v1/history", params={"since": cursor}).json()
        assert answer["complete"]
        assert answer["points"]["step"] == [1, 2, 3, 4, 5]
    assert client.get("/v1/history", params={"since": "9" * 65}).status_code == 422


def test_before_the_first_record_every_series_is_empty(client: httpx.Client) -> None:
    """While the backbone is loaded, too."""
    answer = HistoryView.model_validate(client.get("/v1/history").json())
    assert (answer.complete, answer.points.record, answer.segments) == (True, [], ())


def test_only_the_last_segment_goes_on() -> None:
    """The others have a row of the accuracy matrix."""
    segments = history_view(history_of(25).status, None).segments
    assert [(each.regime, each.ended, each.accuracy) for each in segments] == [
        (1, True, {"1": 0.5, "2": 0.25}),
        (2, True, {"1": 0.5, "2": 0.25}),
        (3, False, {}),
    ]
