"""The past of the run, in bounded memory: a point for each batch, thinned with age, and a segment for each regime.

The loop hands over values after each batch and reads nothing back. A snapshot holds the history, so a restart and a
rollback continue it; `StreamFigures` and the segments' extents are those of an uninterrupted run then.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from streamlearn.errors import Reason
from streamlearn.learner.learner import Step
from streamlearn.shift.detector import Shift
from streamlearn.snapshot.parts import Snapshot, SnapshotPart, read_bounded
from streamlearn.status import (
    Clock,
    Counts,
    DeadLetterRow,
    HistoryPoint,
    HistoryStatus,
    RegimeSegment,
    RegimeStatus,
    RunFigures,
    SnapshotMark,
    SnapshotStatus,
    Status,
    StreamFigures,
)
from streamlearn.stream.batch import Batch, DeadLetteredRecord
from streamlearn.stream.record import RecordId


@dataclass(frozen=True, slots=True)
class BackbonePair:
    """Losses of the same records, before each was trained on and under the untouched backbone."""

    records: int
    tokens: int
    """Learned tokens."""
    loss_sum: float
    """Prequential loss in nats, summed over the learned tokens."""
    backbone_loss_sum: float
    """The same tokens under the untouched backbone."""


@dataclass(frozen=True)
class BatchOutcome:
    """One batch that is done."""

    batch: Batch
    """With the records that were held out."""
    shifts: tuple[Shift, ...]
    """Those that were entered before it."""
    regimes: tuple[int | None, ...]
    """Number of each record's regime; None if it is no longer remembered."""
    last_record: int
    """Ordinal of its last record."""
    number: int
    """Of its step; a batch of which no record is trained on has one too."""
    step: Step | None
    """None when no record of it was trained on."""
    refused: tuple[RecordId, ...] = ()
    """Records whose update was refused."""

    @property
    def first_record(self) -> int:
        """Ordinal of its first record."""
        return self.last_record - len(self.regimes) + 1

    @property
    def moves(self) -> tuple[Shift, ...]:
        """Shifts by which the stream moved to another regime. One that is split from another begins no segment."""
        return tuple(shift for shift in self.shifts if shift.parent is None)

    @property
    def dead_lettered(self) -> tuple[DeadLetteredRecord, ...]:
        """Its unusable records, and those of a refused update."""
        if self.step is None or self.step.refusal is None:
            return self.batch.dead_lettered
        message = refusal_message(self.step)
        refused = (DeadLetteredRecord(record, Reason.NOT_FINITE_UPDATE, message) for record in self.refused)
        return (*self.batch.dead_lettered, *refused)


def refusal_message(step: Step) -> str:
    """Why the records of a refused update are dead letters."""
    return f"the update of step {step.number} was refused: {step.refusal}"


MAX_REGIMES_IN_SEGMENT = 8
"""Regimes whose records are counted in a segment, those with the most."""


def joined_points(older: HistoryPoint, newer: HistoryPoint) -> HistoryPoint:
    """Both points together."""
    stream = _joined_stream(older.stream, newer.stream)
    return HistoryPoint(stream, _joined_run(older.run, newer.run), max(older.revision, newer.revision))


def joined_segments(older: RegimeSegment, newer: RegimeSegment) -> RegimeSegment:
    """Both segments together: the longer one's regime, and the accuracy at the end of the newer one."""
    segment = RegimeSegment(
        regime=(newer if newer.num_records > older.num_records else older).regime,
        first_record=older.first_record,
        last_record=newer.last_record,
        first_step=older.first_step,
        last_step=newer.last_step,
        joined=older.joined + newer.joined,
        records=tuple((Counter(dict(older.records)) + Counter(dict(newer.records))).items()),
        accuracy=newer.accuracy or older.accuracy,
        revision=max(older.revision, newer.revision),
    )
    return replace(segment, records=segment.most_records(MAX_REGIMES_IN_SEGMENT))


def _joined_stream(older: StreamFigures, newer: StreamFigures) -> StreamFigures:
    return StreamFigures(
        step=newer.step,
        record=newer.record,
        batches=older.batches + newer.batches,
        records=older.records + newer.records,
        tokens=older.tokens + newer.tokens,
        learned_tokens=older.learned_tokens + newer.learned_tokens,
        loss_sum=older.loss_sum + newer.loss_sum,
        refusals=older.refusals + newer.refusals,
        dead_letters=_added(older.dead_letters, newer.dead_letters),
    )


def _joined_run(older: RunFigures, newer: RunFigures) -> RunFigures:
    return RunFigures(
        ended_at=newer.ended_at,
        elapsed_s=older.elapsed_s + newer.elapsed_s,
        step_s=older.step_s + newer.step_s,
        longest_step_s=max(older.longest_step_s, newer.longest_step_s),
        lag=_largest([older.lag, newer.lag]),
        requests=older.requests + newer.requests,
        unexplained=older.unexplained + newer.unexplained,
        sample_records=older.sample_records + newer.sample_records,
        sample_tokens=older.sample_tokens + newer.sample_tokens,
        sample_loss_sum=older.sample_loss_sum + newer.sample_loss_sum,
        backbone_loss_sum=older.backbone_loss_sum + newer.backbone_loss_sum,
        average_forgetting=newer.average_forgetting,
        backward_transfer=newer.backward_transfer,
    )


def _added(older: Counts, newer: Counts) -> Counts:
    if not older or not newer:
        return older or newer
    return tuple(sorted((Counter(dict(older)) + Counter(dict(newer))).items()))


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


# A series in bounded memory whose resolution falls with age.
#
# Level l holds rows that stand for 2**l of the rows that were added. When a level is full, its two oldest rows are
# joined into one of the next level; at the last level they stay. So of n rows that were added
#
#     at most num_levels * per_level are kept,                                                              (1)
#     and one with a rows after it stands for at most 1 + a / (per_level - 1), until the last level is full.   (2)
#
# Which rows are joined depends on their number only, so a replay builds the same series.


R = TypeVar("R")


class ThinnedSeries(Generic[R]):
    """Rows, oldest first.

    >>> series = ThinnedSeries[int](lambda older, newer: older + newer, per_level=2, num_levels=3)
    >>> for _ in range(11):
    ...     series.append(1)
    >>> series.rows
    (4, 4, 2, 1)
    """

    def __init__(self, join: Callable[[R, R], R], *, per_level: int, num_levels: int) -> None:
        """`join` makes one row of two neighbours, the older one first."""
        assert per_level >= 2, "two rows are joined"
        self._join = join
        self._per_level = per_level
        self._levels: list[list[R]] = [[] for _ in range(num_levels)]

    @property
    def rows(self) -> tuple[R, ...]:
        """All rows, oldest first."""
        return tuple(row for level in reversed(self._levels) for row in level)

    @property
    def last(self) -> R | None:
        """The newest row; None before the first."""
        return self._levels[0][-1] if self._levels[0] else None

    def append(self, row: R) -> None:
        """Add the newest row."""
        for level in self._levels[:-1]:
            level.append(row)
            if len(level) <= self._per_level:
                return
            row = self._join(level.pop(0), level.pop(0))
        last = self._levels[-1]
        last.append(row)
        if len(last) > self._per_level:
            last[:2] = [self._join(*last[:2])]

    def replace_last(self, row: R) -> None:
        """Put another row in the newest one's place."""
        self._levels[0][-1] = row

    @property
    def newest(self) -> Sequence[R]:
        """The newest rows, oldest first: those that were not joined yet."""
        return self._levels[0]

    def replace_newest(self, index: int, row: R) -> None:
        """Put another row in the place of one of `newest`."""
        self._levels[0][index] = row

    @property
    def levels(self) -> Sequence[Sequence[R]]:
        """The rows by level, for a snapshot."""
        return self._levels

    def load(self, levels: Iterable[Sequence[R]]) -> None:
        """The inverse of `levels`; there may be fewer."""
        loaded = [list(level) for level in levels]
        self._levels = loaded + [[] for _ in range(len(self._levels) - len(loaded))]


POINTS_PER_LEVEL, POINT_LEVELS = 96, 20
"""At most 1,920 points (thinned_series, eq. 1). One that is a batches old stands for at most 1 + a / 95 of them, up to
a million batches, and the last level then holds 96 points of half a million batches each."""
SEGMENTS_PER_LEVEL, SEGMENT_LEVELS = 96, 4
"""At most 384 segments: the newest 96 as they were, older ones joined."""
MAX_MATRIX_REGIMES = 32
"""Regimes in a row of the accuracy matrix: the segment's own, and those with the most records."""
MAX_DEAD_LETTERS = 32
MAX_SNAPSHOTS = 32


class History:
    """Only the loop's thread calls it."""

    def __init__(self, clock: Clock) -> None:
        self.points = ThinnedSeries(joined_points, per_level=POINTS_PER_LEVEL, num_levels=POINT_LEVELS)
        self.segments = ThinnedSeries(joined_segments, per_level=SEGMENTS_PER_LEVEL, num_levels=SEGMENT_LEVELS)
        self.dead_letters: deque[DeadLetterRow] = deque(maxlen=MAX_DEAD_LETTERS)
        self.snapshots: deque[SnapshotMark] = deque(maxlen=MAX_SNAPSHOTS)
        self._clock = clock
        self._origin = f"{clock.wall() * 1000:.0f}"
        self._revision = 0
        self._batch_ended: float | None = None
        self._requests = (0, 0)
        """Those of this process, and those of them that no regime explained, up to the newest batch."""
        self._published: HistoryStatus | None = None
        self._unscored: set[int] | None = None
        """Regimes whose last segment lacks their own accuracy; None: not looked at since it was loaded."""

    @property
    def status(self) -> HistoryStatus:
        """What is published; the same object until something changes."""
        if self._published is None:
            self._published = HistoryStatus(
                origin=self._origin,
                revision=self._revision,
                points=self.points.rows,
                segments=self.segments.rows,
                dead_letters=tuple(self.dead_letters),
                snapshots=tuple(self.snapshots),
            )
        return self._published

    @property
    def last_record(self) -> int:
        """Ordinal of the newest record in it; 0 before the first."""
        return self.points.last.stream.record if self.points.last is not None else 0

    def add(self, outcome: BatchOutcome, status: Status) -> None:
        """Add a batch that is done; `status` is what was published after it."""
        self._changed()
        run = self._run_figures(outcome, status)
        self.points.append(HistoryPoint(_stream_figures(outcome), run, self._revision))
        self._extend_segments(outcome, status.adaptation.regimes)
        self.complete_rows(status.adaptation.regimes)
        for record, reason, message in outcome.dead_lettered[-MAX_DEAD_LETTERS:]:
            origin, offset = record
            row = DeadLetterRow(
                origin.topic, origin.partition, offset, str(reason), message, run.ended_at, self._revision
            )
            self.dead_letters.append(row)

    def add_pair(self, pair: BackbonePair) -> None:
        """Add a comparison with the backbone to the newest batch."""
        last = self.points.last
        if last is None:
            return
        self._changed()
        run = replace(
            last.run,
            sample_records=last.run.sample_records + pair.records,
            sample_tokens=last.run.sample_tokens + pair.tokens,
            sample_loss_sum=last.run.sample_loss_sum + pair.loss_sum,
            backbone_loss_sum=last.run.backbone_loss_sum + pair.backbone_loss_sum,
        )
        self.points.replace_last(HistoryPoint(last.stream, run, self._revision))

    def complete_rows(self, regimes: Sequence[RegimeStatus]) -> None:
        """Fill in what a regime's own segment ended with, which may be scored some batches later."""
        if self._unscored is None:
            self._unscored = {segment.regime for segment in self.segments.newest[:-1] if not _has_own(segment)}
        if not self._unscored:
            return
        for regime in regimes:
            if regime.number in self._unscored and regime.end_accuracy is not None:
                self._complete_row(regime.number, regime.end_accuracy)

    def _complete_row(self, regime: int, accuracy: float) -> None:
        """Fill it in for the regime's last segment, unless that one was joined to another or goes on."""
        segments = self.segments.newest
        index = max((i for i, segment in enumerate(segments) if segment.regime == regime), default=None)
        if index == len(segments) - 1:
            return
        assert self._unscored is not None
        self._unscored.remove(regime)
        if index is not None and not _has_own(segments[index]):
            self._changed()
            row = tuple(sorted((*segments[index].accuracy, (regime, accuracy))))
            self.segments.replace_newest(index, replace(segments[index], accuracy=row, revision=self._revision))

    def add_snapshot(self, snapshot: SnapshotStatus, record: int) -> None:
        """Add a snapshot that is durable; `record` is the ordinal of the newest record in it."""
        self._changed()
        if self.snapshots and self.snapshots[-1].name == snapshot.name:  # the same step, written again
            self.snapshots.pop()
        mark = SnapshotMark(snapshot.name, snapshot.step, record, snapshot.written_at, self._revision)
        self.snapshots.append(mark)

    def begin_again(self) -> None:
        """Begin anew, or go on from what is loaded next: revisions that were published before mean nothing now."""
        before = self._origin
        self._origin = f"{max(self._clock.wall() * 1000, float(before) + 1):.0f}"
        self._revision = 0
        self._published = None
        self._unscored = None
        self.points.load(())
        self.segments.load(())
        self.dead_letters.clear()
        self.snapshots.clear()

    def _changed(self) -> None:
        self._revision += 1
        self._published = None

    def _run_figures(self, outcome: BatchOutcome, status: Status) -> RunFigures:
        now, step_s = self._clock.monotonic(), 0.0 if outcome.step is None else outcome.step.seconds
        elapsed_s = step_s if self._batch_ended is None else now - self._batch_ended
        self._batch_ended = now
        lags = [partition.lag for partition in status.partitions if partition.lag is not None]
        before, self._requests = self._requests, _requests(status)
        return RunFigures(
            ended_at=self._clock.wall(),
            elapsed_s=elapsed_s,
            step_s=step_s,
            longest_step_s=step_s,
            lag=sum(lags) if lags else None,
            requests=self._requests[0] - before[0],
            unexplained=self._requests[1] - before[1],
            average_forgetting=status.adaptation.average_forgetting,
            backward_transfer=status.adaptation.backward_transfer,
        )

    def _extend_segments(self, outcome: BatchOutcome, regimes: Sequence[RegimeStatus]) -> None:
        """Let the segment under way go on to the end of the batch; where the stream moved, end it and begin another."""
        begin = outcome.first_record
        for shift in outcome.moves:
            onset = min(max(shift.onset, begin), outcome.last_record)
            self._extend(outcome, begin, onset - 1)
            self._end_segment(regimes)
            self._open_segment(shift.regime, onset, outcome.number)
            begin = onset
        if self.segments.last is None and outcome.regimes and outcome.regimes[0] is not None:
            self._open_segment(outcome.regimes[0], begin, outcome.number)  # the history begins within a segment
        self._extend(outcome, begin, outcome.last_record)

    def _extend(self, outcome: BatchOutcome, first: int, last: int) -> None:
        """Add the batch's records from `first` to `last` to the segment under way."""
        segment, offset = self.segments.last, outcome.first_record
        if segment is None or last < first:
            return
        records = Counter(dict(segment.records))
        records.update(number for number in outcome.regimes[first - offset : last + 1 - offset] if number is not None)
        counted = tuple(records.items())
        self.segments.replace_last(
            replace(segment, last_record=last, last_step=outcome.number, records=counted, revision=self._revision)
        )

    def _end_segment(self, regimes: Sequence[RegimeStatus]) -> None:
        segment = self.segments.last
        if segment is not None:
            records = segment.most_records(MAX_REGIMES_IN_SEGMENT)
            accuracy = _matrix_row(regimes, segment.regime)
            if self._unscored is not None:
                self._unscored.add(segment.regime)
            self.segments.replace_last(replace(segment, records=records, accuracy=accuracy, revision=self._revision))

    def _open_segment(self, regime: int, first: int, step: int) -> None:
        segment = RegimeSegment(regime, first, first - 1, step, step, revision=self._revision)
        if self.segments.last is not None and not self.segments.last.num_records:
            self.segments.replace_last(segment)
        else:
            self.segments.append(segment)


def _stream_figures(outcome: BatchOutcome) -> StreamFigures:
    step = outcome.step
    is_refused = step is not None and step.refusal is not None
    trained = None if is_refused else step
    return StreamFigures(
        step=outcome.number,
        record=outcome.last_record,
        records=len(outcome.regimes),
        tokens=0 if trained is None else trained.tokens,
        learned_tokens=0 if trained is None else trained.learned_tokens,
        loss_sum=0.0 if trained is None else trained.loss * trained.learned_tokens,
        refusals=int(is_refused),
        dead_letters=_by_reason(outcome),
    )


def _by_reason(outcome: BatchOutcome) -> Counts:
    return tuple(sorted(Counter(str(each.reason) for each in outcome.dead_lettered).items()))


def _requests(status: Status) -> tuple[int, int]:
    """Requests answered by this process, and those of them that no regime explained."""
    unexplained = sum(each.number for each in status.requests if not each.known)
    return sum(each.number for each in status.requests), unexplained


def _has_own(segment: RegimeSegment) -> bool:
    """Whether the segment's row of the matrix has its own regime."""
    return segment.regime in dict(segment.accuracy)


def _matrix_row(regimes: Sequence[RegimeStatus], ended: int) -> tuple[tuple[int, float], ...]:
    """Newest accuracy of each regime, but that of the regime whose segment `ended`: `complete_rows` adds it."""
    scored = [regime for regime in regimes if regime.now is not None and regime.number != ended]
    largest = nlargest(MAX_MATRIX_REGIMES - 1, scored, key=lambda regime: regime.records)
    return tuple(sorted((regime.number, regime.now.accuracy) for regime in largest if regime.now is not None))


# The history as one file of a snapshot, `history.json`: for each series its columns' names, and a list for each row.
#
# A later release may add columns: where a file has none of a name, its rows get the default.


NAME = "history.json"
MAX_BYTES = 64 << 20
"""Maximum size of the file in bytes: far more than bounded series take, and still quick to read."""
_NOT_STORED = "revision"  # a process counts its own


def history_part(history: History) -> SnapshotPart:
    """The part of a snapshot that holds the history."""
    return SnapshotPart(NAME, lambda path: _write(path, to_json(history)))


def load_history(history: History, snapshot: Snapshot | None) -> None:
    """Go on from a snapshot, or begin anew. One of an earlier release has no history, and leaves it empty.

    Raises:
        SnapshotDamagedError: the file changed since it was verified.
        SnapshotError: this process cannot read it.
    """
    history.begin_again()
    if snapshot is not None and NAME in snapshot.manifest.files:
        load_json(history, orjson.loads(read_bounded(snapshot.path / NAME, MAX_BYTES)))


def to_json(history: History) -> dict[str, Any]:
    """What the file holds."""
    return {
        "points": {
            "columns": [*_columns(StreamFigures), *_columns(RunFigures)],
            "levels": [
                [[*_values(point.stream), *_values(point.run)] for point in level] for level in history.points.levels
            ],
        },
        "segments": {
            "columns": _columns(RegimeSegment),
            "levels": [[_values(segment) for segment in level] for level in history.segments.levels],
        },
        "dead_letters": {"columns": _columns(DeadLetterRow), "rows": [_values(row) for row in history.dead_letters]},
        "snapshots": {"columns": _columns(SnapshotMark), "rows": [_values(row) for row in history.snapshots]},
    }


def load_json(history: History, values: Mapping[str, Any]) -> None:
    """The inverse of `to_json`, into an empty history."""
    points, segments = values["points"], values["segments"]
    history.points.load([[_point(points["columns"], row) for row in level] for level in points["levels"]])
    history.segments.load([_rows(RegimeSegment, segments["columns"], level) for level in segments["levels"]])
    history.dead_letters.extend(_rows(DeadLetterRow, values["dead_letters"]["columns"], values["dead_letters"]["rows"]))
    history.snapshots.extend(_rows(SnapshotMark, values["snapshots"]["columns"], values["snapshots"]["rows"]))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with path.open("xb") as file:
        file.write(orjson.dumps(values))


def _columns(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != _NOT_STORED]


def _values(row: Any) -> list[Any]:
    return [getattr(row, name) for name in _columns(type(row))]


def _rows(kind: type[R], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[R]:
    return [_row(kind, dict(zip(columns, row, strict=True))) for row in rows]


def _row(kind: type[R], values: Mapping[str, Any]) -> R:
    return kind(**{name: _tuples(values[name]) for name in _columns(kind) if name in values})


def _point(columns: Sequence[str], row: Sequence[Any]) -> HistoryPoint:
    values = dict(zip(columns, row, strict=True))
    return HistoryPoint(_row(StreamFigures, values), _row(RunFigures, values))


def _tuples(value: Any) -> Any:
    """Lists, which JSON has in place of tuples, as tuples."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
