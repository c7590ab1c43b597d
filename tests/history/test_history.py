"""Points, segments and their bounds; what a batch adds, what a joined row keeps, and what the file gives back."""

import math
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamlearn import history as module
from streamlearn.errors import Reason
from streamlearn.events import Event
from streamlearn.history import (
    FILE_NAME,
    MAX_DEAD_LETTERS,
    MAX_MATRIX_REGIMES,
    MAX_SNAPSHOTS,
    POINT_LEVELS,
    POINTS_PER_LEVEL,
    SEGMENT_LEVELS,
    SEGMENTS_PER_LEVEL,
    BackbonePair,
    History,
    ThinnedSeries,
)
from streamlearn.series import HistoryStatus, RegimeSegment
from streamlearn.status import AdaptationStatus, PartitionStatus, RegimeStatus, Scoring, SnapshotStatus
from streamlearn.stream.record import Batch
from tests.history.outcomes import (
    PER_BATCH,
    STATUS,
    HandClock,
    history_of,
    outcome,
    scored,
    shift,
    stepped,
    unusable,
)


def extents(history: History) -> list[tuple[int, int, int]]:
    return [(segment.regime, segment.first_record, segment.last_record) for segment in history.status.segments]


def test_a_batch_is_a_point() -> None:
    """Loss as a sum over learned tokens, times, what was published after it, and the comparison with the backbone."""
    hand = HandClock()
    history = History(hand.clock)
    adaptation = AdaptationStatus(average_forgetting=0.25, backward_transfer=-0.5)
    partitions = (PartitionStatus("orders", 0, 4, 7), PartitionStatus("orders", 1, 4, 2))
    history.add(outcome(1), replace(STATUS, adaptation=adaptation, partitions=partitions))
    hand.now = 3.0
    history.add(outcome(2), STATUS)
    hand.now = 4.0
    requests = replace(STATUS, requests={(True, "regime"): 5, (False, "mean"): 1})
    empty = outcome(3, (), last_record=2 * PER_BATCH, step=None, batch=Batch((), (), (unusable(9),)))
    published = history.status
    history.add(empty, requests)
    history.add_pair(BackbonePair(2, 10, 20.0, 30.0))
    history.add_pair(BackbonePair(1, 5, 5.0, 15.0))
    assert len(published.points) == 2, "a published history never changes"
    first, second, third = history.status.points
    assert (third.records, third.requests, third.unexplained_requests) == (0, 6, 1)
    assert (third.sample_records, third.sample_loss, third.backbone_loss) == (3, round(25 / 15, 6), 3.0)
    assert (first.step, first.record, first.records) == (1, PER_BATCH, PER_BATCH)
    assert (first.loss_sum, first.learned_tokens) == (3.0 * 11, 11)
    assert (first.lag, first.average_forgetting, first.backward_transfer) == (9, 0.25, -0.5)
    assert (first.elapsed_s, second.elapsed_s) == (0.5, 3.0)  # the first one's: its step's
    assert (second.at, second.lag) == (1_000_003.0, None)


def test_a_refused_update_has_no_loss_and_its_records_are_dead_letters() -> None:
    """By reason, with the message that the sink gets."""
    history = History(HandClock().clock)
    done = outcome(1, step=stepped(1, refusal="loss is inf"), refused=tuple(unusable(n).id for n in range(PER_BATCH)))
    history.add(done, STATUS)
    [point] = history.status.points
    assert (point.refusals, point.tokens, point.loss_sum) == (1, 0, 0.0)
    assert point.dead_letters == {str(Reason.NOT_FINITE_UPDATE): PER_BATCH}
    newest = history.status.dead_letters[-1]
    assert (newest.topic, newest.partition, newest.offset) == ("orders", 0, PER_BATCH - 1)
    assert (newest.reason, newest.message) == ("not_finite_update", "the update of step 1 was refused: loss is inf")


def test_memory_is_bounded_and_every_sum_stays_exact() -> None:
    """Many more batches than there are points, with more regimes, dead letters and snapshots than are kept."""
    num_batches = 5000
    history = history_of(num_batches)
    for number in range(2 * MAX_SNAPSHOTS):
        for written_at in (1.0, 2.0):  # written again for an operator's change, and listed once
            history.add_snapshot(SnapshotStatus(f"{number:08d}", number, written_at), number)
    status = history.status
    assert len(status.points) < POINTS_PER_LEVEL * 7 <= POINTS_PER_LEVEL * POINT_LEVELS
    assert len(status.segments) <= SEGMENTS_PER_LEVEL * SEGMENT_LEVELS
    assert (len(status.dead_letters), len(status.snapshots)) == (MAX_DEAD_LETTERS, MAX_SNAPSHOTS)
    points = status.points
    assert sum(point.batches for point in points) == num_batches
    assert sum(point.records for point in points) == num_batches * PER_BATCH == points[-1].record
    learned = [stepped(number).learned_tokens for number in range(1, num_batches + 1)]
    losses = [stepped(number).loss * stepped(number).learned_tokens for number in range(1, num_batches + 1)]
    assert sum(point.learned_tokens for point in points) == sum(learned)
    assert math.fsum(point.loss_sum for point in points) == math.fsum(losses)  # of whole numbers: not rounded
    assert sum(point.dead_letters.get("empty", 0) for point in points) == num_batches // 7
    assert sum(point.elapsed_s for point in points) == num_batches - 1 + 0.5
    assert sum(segment.joined for segment in status.segments) == num_batches / 10


def test_segments_follow_the_shifts() -> None:
    """A shift begins one at its onset, within the batch; a split begins none."""
    history = History(HandClock().clock)
    history.add(outcome(1, shifts=(shift(1, 1),)), scored())
    history.add(outcome(2, (1, 1, 2, 2), shifts=(shift(2, 7),)), scored(0.75))
    history.add(outcome(3, (2, 3, 2, 3), shifts=(shift(3, 10, parent=2),)), scored(0.5, 0.25))
    assert extents(history) == [(1, 1, 6), (2, 7, 12)]
    ended, current = history.status.segments
    assert (ended.records, ended.accuracy, ended.first_step, ended.last_step) == ({"1": 6}, {"1": 0.75}, 1, 2)
    assert (current.records, current.accuracy) == ({"2": 4, "3": 2}, {})


def test_two_shifts_in_one_batch_make_two_segments() -> None:
    """Unless both begin at the same record: then the first had none."""
    history = History(HandClock().clock)
    history.add(outcome(1, (1, 2, 3, 3), shifts=(shift(1, 1), shift(2, 2), shift(3, 3))), scored())
    assert extents(history) == [(1, 1, 1), (2, 2, 2), (3, 3, 4)]
    history.add(outcome(2, (5, 5, 5, 5), shifts=(shift(4, 5), shift(5, 5))), scored())
    assert extents(history)[-2:] == [(3, 3, 4), (5, 5, 8)]
    begins_within = History(HandClock().clock)
    begins_within.add(outcome(9, (4, 4, 4, 4)), scored())
    assert extents(begins_within) == [(4, 33, 36)]


def test_joined_segments_have_the_longest_ones_regime() -> None:
    """And the records of both, and the newer one's row of the matrix."""
    history = history_of(10 * (SEGMENTS_PER_LEVEL + 1))
    oldest = history.status.segments[0]
    assert oldest == RegimeSegment(
        regime=1,
        first_record=1,
        last_record=20 * PER_BATCH,
        first_step=1,
        last_step=20,
        joined=2,
        records={"1": 10 * PER_BATCH, "2": 10 * PER_BATCH},
        accuracy={"1": 0.5, "2": 0.25},
        ended=True,
    )


def test_a_row_of_the_matrix_is_bounded() -> None:
    """The segment's own regime, and those with the most records."""
    history = History(HandClock().clock)
    status = scored(*[0.5] * (MAX_MATRIX_REGIMES + 3))
    first, second, *others = status.adaptation.regimes
    fewest = (replace(first, records=1), replace(second, records=2), *others)
    history.add(outcome(1, shifts=(shift(1, 1),)), status)
    history.add(outcome(2, shifts=(shift(2, 5),)), replace(status, adaptation=AdaptationStatus(regimes=fewest)))
    row = history.status.segments[0].accuracy
    assert len(row) == MAX_MATRIX_REGIMES
    assert "1" in row
    assert "2" not in row


def test_a_regime_that_is_scored_later_completes_the_row_of_its_segment() -> None:
    """With its accuracy at the end; a segment that it returned after keeps its own."""
    history = History(HandClock().clock)
    history.add(outcome(1, shifts=(shift(1, 1),)), scored())
    status = scored(0.75, 0.5)
    first, second = status.adaptation.regimes
    early = (replace(first, end_accuracy=None), second)
    history.add(outcome(2, (2, 2, 2, 2), shifts=(shift(2, 5),)), replace(status, adaptation=AdaptationStatus(early)))
    assert history.status.segments[0].accuracy == {"2": 0.5}
    history.complete_rows((replace(first, end_accuracy=0.25), second))
    assert history.status.segments[0].accuracy == {"1": 0.25, "2": 0.5}
    history.add(outcome(3, (1, 1, 1, 1), shifts=(shift(1, 9),)), scored(0.625, 0.5))
    assert [segment.accuracy for segment in history.status.segments] == [
        {"1": 0.25, "2": 0.5},
        {"1": 0.625, "2": 0.5},
        {},
    ]


def kept_in(folder: Path, num_batches: int) -> History:
    """A history with a snapshot every 50 batches, a comparison every 7, and regimes that are scored late."""
    folder.mkdir(exist_ok=True)
    hand = HandClock()
    history = History(hand.clock, folder)
    for number in range(1, num_batches + 1):
        hand.now = float(number)
        add(history, number)
    return history


def add(history: History, number: int) -> None:
    regime = (number - 1) // 10 + 1
    begins = (shift(regime, (number - 1) * PER_BATCH + 1),) if number % 10 == 1 else ()
    bad = Batch((), (), (unusable(number),)) if number % 7 == 0 else Batch((), ())
    history.add(outcome(number, (regime,) * PER_BATCH, shifts=begins, batch=bad), scored(0.5, 0.25))
    if number % 7 == 0:
        history.add_pair(BackbonePair(1, 5, 1.0, 2.0))
    if number % 10 == 3:
        late = RegimeStatus(regime - 1, 0, history=(Scoring(number, 1.0, 0.5),), end_accuracy=0.125)
        history.complete_rows((late,))
    if number % 50 == 0:
        history.add_snapshot(SnapshotStatus(f"{number:08d}", number, float(number)), number * PER_BATCH)


def test_a_restart_continues_with_every_bit_up_to_its_snapshot(tmp_path: Path) -> None:
    """All series and their levels; lines of later steps are cut, and written again by the replay."""
    whole = kept_in(tmp_path, 500)
    lines = (tmp_path / FILE_NAME).read_bytes()
    for step in (350, 0):
        hand = HandClock()
        again = History(hand.clock, tmp_path)
        again.restore(step)
        cut = (tmp_path / FILE_NAME).read_bytes()
        assert lines.startswith(cut)
        assert again.status == kept_in(tmp_path / f"{step}", step).status if step else again.status == HistoryStatus()
        for number in range(step + 1, 501):
            hand.now, again._batch_ended = float(number), number - 1.0 if number > 1 else None
            add(again, number)
        assert again.points._levels == whole.points._levels
        assert again.segments._levels == whole.segments._levels
        assert again.status == whole.status
        (tmp_path / FILE_NAME).write_bytes(lines)


def test_a_damaged_line_is_dropped_and_named(tmp_path: Path) -> None:
    """Whatever it holds, it costs its batch and no more; a torn last line too. The next start has nothing to say."""
    kept_in(tmp_path, 60)
    path = tmp_path / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\x00{\n", b"[1]\n", b'{"step": "x"}\n', b'{"step": 3, "point": {"step": 3}}\n']
    damaged += [b'{"step": 3, "point": {"step": 3, "record": 3, "tokens": 1%s}}\n' % (b"0" * 30)]
    segment = b'"regime": 1, "first_record": 1, "last_record": 9, "first_step": 1, "last_step": 3, "records": {"x": 1}'
    damaged += [b'{"step": 3, "segments": [{%s}]}\n' % segment]
    path.write_bytes(b"".join([*lines[:5], *damaged, *lines[5:], lines[-1][:30]]))
    history = History(HandClock().clock, tmp_path)
    with capture_logs() as events:
        history.restore(60)
        assert [(event["event"], event["lines"]) for event in events] == [(Event.HISTORY_LINES_DROPPED, 7)]
        history.restore(60)
    assert len(events) == 1
    assert history.status.points[-1].step == 60
    assert sum(point.batches for point in history.status.points) == 60


def test_missing_lines_leave_a_gap(tmp_path: Path) -> None:
    """The segment before it ends there."""
    history = kept_in(tmp_path, 5)
    history.add(outcome(9, (1,) * PER_BATCH), STATUS)
    assert [(segment.first_record, segment.last_record, segment.ended) for segment in history.status.segments] == [
        (1, 20, True),
        (33, 36, False),
    ]


def test_a_history_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """It is logged once, and goes on in memory; once the disk has room, lines are written again."""
    folder = tmp_path / "gone"
    history = History(HandClock().clock, folder)
    with capture_logs() as events:
        history.restore(None)
        for number in (1, 2):
            add(history, number)
        history.sync(rewind_to=0)
        assert [event["event"] for event in events] == [Event.HISTORY_FAILED]
        folder.mkdir()
        add(history, 3)
    assert [point.step for point in history.status.points] == [1, 2, 3]
    again = History(HandClock().clock, folder)
    again.restore(3)
    assert [point.step for point in again.status.points] == [3]


def test_a_large_file_is_thinned_up_to_the_oldest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that returns to it, or to a later one, finds the history that it left."""
    history = kept_in(tmp_path, 900)
    before = (tmp_path / FILE_NAME).stat().st_size
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    history.sync(rewind_to=800)
    assert (tmp_path / FILE_NAME).stat().st_size < before / 2
    for step in (900, 800):
        again = History(HandClock().clock, tmp_path)
        again.restore(step)
        assert again.status == kept_in(tmp_path / f"{step}", step).status
        assert again.points._levels == kept_in(tmp_path / f"again{step}", step).points._levels


Span = tuple[int, int]
"""First and last of the rows that a row stands for."""


def joined_spans(older: Span, newer: Span) -> Span:
    assert older[1] + 1 == newer[0], "neighbors are joined"
    return older[0], newer[1]


def series(num_rows: int, *, per_level: int = 4, num_levels: int = 6) -> ThinnedSeries[Span]:
    built = ThinnedSeries[Span](joined_spans, per_level=per_level, num_levels=num_levels)
    for number in range(1, num_rows + 1):
        built.append((number, number))
    return built


def test_a_row_stands_for_no_more_than_its_age_allows() -> None:
    """Eq. 1 and 2; joining loses nothing, and repeats nothing."""
    assert len(series(5000, num_levels=3).rows) == 3 * 4
    for num_rows in range(1, 120):
        widths = [last - first + 1 for first, last in series(num_rows).rows]
        assert sum(widths) == num_rows
        ages = [num_rows - end for end in accumulate(widths)]
        assert all(width <= 1 + age / 3 for width, age in zip(widths, ages, strict=True))
