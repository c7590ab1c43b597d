"""The file of a snapshot: what is read is what was written, also by a release with fewer columns."""

from pathlib import Path

import orjson

from streamlearn.history import History, history_part, load_json, to_json
from streamlearn.status import SnapshotStatus
from tests.history.outcomes import HandClock, history_of, outcome, scored


def loaded(values: object) -> History:
    history = History(HandClock().clock)
    load_json(history, orjson.loads(orjson.dumps(values)))
    return history


def test_a_history_that_was_read_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """To the last bit, all series and their levels."""
    hand = HandClock()
    history = history_of(333, hand)
    history.add_snapshot(SnapshotStatus("00000333", 333, 5.0), 1332)
    history_part(history).write(tmp_path / "history.json")
    again = loaded(orjson.loads((tmp_path / "history.json").read_bytes()))
    assert to_json(again) == to_json(history)
    for each in (history, again):
        each._clock, each._batch_ended = hand.clock, hand.now  # one clock for both
        for number in range(334, 500):
            each.add(outcome(number, (34,) * 4), scored(0.5))
    assert to_json(again) == to_json(history)


def test_a_missing_column_gets_its_default() -> None:
    """What a later release adds is not in older files."""
    values = to_json(history_of(30))
    columns = values["points"]["columns"]
    at = columns.index("refusals")
    columns.remove("refusals")
    for level in values["points"]["levels"]:
        for row in level:
            del row[at]
    assert {point.stream.refusals for point in loaded(values).status.points} == {0}


def test_beginning_again_makes_old_cursors_unknown() -> None:
    """Also when the wall clock stands still."""
    history = history_of(3)
    before = history.status.origin
    history.begin_again()
    assert history.status.origin != before
    assert (history.status.points, history.status.revision) == ((), 0)
