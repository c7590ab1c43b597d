"""The past of the run, for charts: a point for each batch, thinned with age, and a segment for each regime.

`history.jsonl` in the state folder has a line for each batch. A restart and a rollback cut it at the step of the
snapshot that they continue from, so everything in it that depends on the stream alone is that of an uninterrupted run.
It is no part of a snapshot: a line that is damaged or cannot be written is missing from the charts, and nothing else.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from pathlib import Path
from typing import Generic, TypeVar

import orjson
from pydantic import TypeAdapter

from streamlearn.board import Clock
from streamlearn.errors import Reason
from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Step
from streamlearn.series import DeadLetterRow, HistoryPoint, HistoryStatus, RegimeSegment, SnapshotMark
from streamlearn.shift.detector import Shift
from streamlearn.snapshot.files import Files
from streamlearn.status import RegimeStatus, SnapshotStatus, Status
from streamlearn.stream.position import RecordId
from streamlearn.stream.record import Batch, DeadLetteredRecord

_log = get_logger("history")


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
    """Number of its step; a batch of which no record is trained on has one too."""
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
_NEWEST = {"step", "record", "at", "average_forgetting", "backward_transfer"}


def joined_points(older: HistoryPoint, newer: HistoryPoint) -> HistoryPoint:
    special = {
        "longest_step_seconds": max(older.longest_step_seconds, newer.longest_step_seconds),
        "lag": max((lag for lag in (older.lag, newer.lag) if lag is not None), default=None),
        "dead_letters": dict(Counter(older.dead_letters) + Counter(newer.dead_letters)),
        **{name: getattr(newer, name) for name in _NEWEST},
    }
    names = [field.name for field in fields(HistoryPoint) if field.name not in special]
    return HistoryPoint(**special, **{name: getattr(older, name) + getattr(newer, name) for name in names})


def joined_segments(older: RegimeSegment, newer: RegimeSegment) -> RegimeSegment:
    """Both segments together: the longer one's regime, and the accuracy at the end of the newer one."""
    return RegimeSegment(
        regime=(newer if newer.num_records > older.num_records else older).regime,
        first_record=older.first_record,
        last_record=newer.last_record,
        first_step=older.first_step,
        last_step=newer.last_step,
        joined=older.joined + newer.joined,
        ended=newer.ended,
        records=_most(Counter(older.records) + Counter(newer.records)),
        accuracy=newer.accuracy or older.accuracy,
    )


def _most(records: Counter[str]) -> dict[str, int]:
    """The regimes with the most records, most first, and of equal ones the older first."""
    ordered = sorted(records.items(), key=lambda row: (-row[1], int(row[0])))
    return dict(ordered[:MAX_REGIMES_IN_SEGMENT])


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
        """`join` makes one row of two neighbors, the older one first."""
        assert per_level >= 2, "two rows are joined"
        self._join = join
        self._per_level = per_level
        self._levels: list[list[R]] = [[] for _ in range(num_levels)]

    @property
    def rows(self) -> tuple[R, ...]:
        return tuple(row for level in reversed(self._levels) for row in level)

    @property
    def last(self) -> R | None:
        """The newest row; None before the first."""
        return self._levels[0][-1] if self._levels[0] else None

    def append(self, row: R) -> None:
        for level in self._levels[:-1]:
            level.append(row)
            if len(level) <= self._per_level:
                return
            row = self._join(level.pop(0), level.pop(0))
        last = self._levels[-1]
        last.append(row)
        if len(last) > self._per_level:
            last[:2] = [self._join(*last[:2])]

    @property
    def newest(self) -> list[R]:
        """The newest rows, oldest first: those that were not joined yet. Their values may be replaced."""
        return self._levels[0]

    def put_joined(self, row: R, number: int) -> None:
        """Add a row that stands for `number` rows, where `append` left it."""
        self._levels[min(number.bit_length(), len(self._levels)) - 1].append(row)


POINTS_PER_LEVEL, POINT_LEVELS = 96, 20
"""At most 1,920 points (eq. 1). One that is a batches old stands for at most 1 + a / 95 of them, up to a million
batches, and the last level then holds 96 points of half a million batches each."""
SEGMENTS_PER_LEVEL, SEGMENT_LEVELS = 96, 4
"""At most 384 segments: the newest 96 as they were, older ones joined."""
MAX_MATRIX_REGIMES = 32
"""Regimes in a row of the accuracy matrix: the segment's own, and those with the most records."""
MAX_DEAD_LETTERS = 32
MAX_SNAPSHOTS = 32
FILE_NAME = "history.jsonl"
MAX_BYTES = 16 << 20  # some 25,000 batches, read in half a second; then older lines are replaced by thinned ones


@dataclass(frozen=True, slots=True)
class _Line:
    """A change. A point replaces the one of its step, a segment the one with its first record.

    In a file that was thinned, the oldest points and segments stand for several.
    """

    step: int
    point: HistoryPoint | None = None
    segments: tuple[RegimeSegment, ...] = ()
    dead_letters: tuple[DeadLetterRow, ...] = ()
    snapshot: SnapshotMark | None = None


_LINE = TypeAdapter(_Line)
_DAMAGE = (ValueError, TypeError, LookupError)


def _parsed(text: bytes) -> _Line:
    line = _LINE.validate_json(text)
    orjson.dumps(line)  # raises for an integer that no later line could hold
    return line


class History:
    """Only the loop calls it. Without a folder it is kept in memory only."""

    def __init__(self, clock: Clock, folder: Path | None = None, files: Files | None = None) -> None:
        self._clock = clock
        self._path = None if folder is None else folder / FILE_NAME
        self._files = files if files is not None else Files()
        self._fault = ""
        self._batch_ended: float | None = None
        self._requests = (0, 0)
        """Requests answered by this process, and those of them that no regime explained, up to the newest batch."""
        self._clear()

    def _clear(self) -> None:
        self.points = ThinnedSeries(joined_points, per_level=POINTS_PER_LEVEL, num_levels=POINT_LEVELS)
        self.segments = ThinnedSeries(joined_segments, per_level=SEGMENTS_PER_LEVEL, num_levels=SEGMENT_LEVELS)
        self.dead_letters: deque[DeadLetterRow] = deque(maxlen=MAX_DEAD_LETTERS)
        self.snapshots: deque[SnapshotMark] = deque(maxlen=MAX_SNAPSHOTS)
        self._published: HistoryStatus | None = None

    @property
    def status(self) -> HistoryStatus:
        """The published history; the same object until something changes."""
        if self._published is None:
            self._published = HistoryStatus(
                self.points.rows, self.segments.rows, tuple(self.dead_letters), tuple(self.snapshots)
            )
        return self._published

    def restore(self, step: int | None) -> None:
        """Continue from the snapshot of a step: later lines are cut. None: the run is new, and so is the history."""
        self._clear()
        if self._path is None:
            return
        try:
            data = b"" if step is None or not self._path.exists() else self._path.read_bytes()
            kept, _, dropped = self._read(data, step or 0)
            if dropped:
                _log.warning(Event.HISTORY_LINES_DROPPED, path=str(self._path), lines=dropped)
            if kept != data or step is None:
                self._files.replace(self._path, kept)
        except OSError as error:
            self._failed(error)

    def _read(self, data: bytes, step: int) -> tuple[bytes, bytes, int]:
        """Apply the lines up to a step; return them, the later ones, and how many were damaged."""
        kept: list[bytes] = []
        later: list[bytes] = []
        dropped = 0
        for text in data.splitlines():
            try:
                line = _parsed(text)
                if line.step <= step:
                    self._apply(line)
                (kept if line.step <= step else later).append(text + b"\n")
            except _DAMAGE:
                dropped += 1
        return b"".join(kept), b"".join(later), dropped

    def sync(self, *, rewind_to: int) -> None:
        """Make the lines durable, with a snapshot; `rewind_to` is the step of the oldest one that a run may return to.

        Where the file has grown too large, lines up to that step are replaced by thinned ones.
        """
        if self._path is None:
            return
        try:
            if not self._path.exists():
                return
            if self._path.stat().st_size > MAX_BYTES:
                older = History(Clock())
                _, later, _ = older._read(self._path.read_bytes(), rewind_to)
                self._files.replace(self._path, older._thinned() + later)
            self._files.sync(self._path)
        except OSError as error:
            self._failed(error)

    def _thinned(self) -> bytes:
        """Lines that make up this history, oldest first."""
        lines = [_Line(point.step, point) for point in self.points.rows]
        lines += [_Line(segment.last_step, segments=(segment,)) for segment in self.segments.rows]
        lines += [_Line(row.step, dead_letters=(row,)) for row in self.dead_letters]
        lines += [_Line(mark.step, snapshot=mark) for mark in self.snapshots]
        ordered = sorted(lines, key=lambda line: line.step)
        return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in ordered)

    def add(self, outcome: BatchOutcome, status: Status) -> None:
        """Add a batch that is done; `status` is what was published after it."""
        point = self._point(outcome, status)
        self._write(
            _Line(
                outcome.number,
                point,
                tuple(self._segments_after(outcome, status.adaptation.regimes)),
                tuple(_dead_letters(outcome, point.at)),
            )
        )
        self.complete_rows(status.adaptation.regimes)

    def add_pair(self, pair: BackbonePair) -> None:
        """Add a comparison with the backbone to the newest batch."""
        last = self.points.last
        if last is None:
            return
        point = replace(
            last,
            sample_records=last.sample_records + pair.records,
            sample_tokens=last.sample_tokens + pair.tokens,
            sample_loss_sum=last.sample_loss_sum + pair.loss_sum,
            backbone_loss_sum=last.backbone_loss_sum + pair.backbone_loss_sum,
        )
        self._write(_Line(point.step, point))

    def complete_rows(self, regimes: Sequence[RegimeStatus]) -> None:
        """Fill in a regime's accuracy at the end of its newest segment, which may be scored some batches later."""
        newest = {segment.regime: segment for segment in self.segments.newest}
        for regime in regimes:
            segment, key = newest.get(regime.number), str(regime.number)
            if segment is None or not segment.ended or key in segment.accuracy or regime.end_accuracy is None:
                continue
            accuracy = {**segment.accuracy, key: regime.end_accuracy}
            ordered = dict(sorted(accuracy.items(), key=lambda row: int(row[0])))
            step = self.points.last.step if self.points.last is not None else segment.last_step
            self._write(_Line(step, segments=(replace(segment, accuracy=ordered),)))

    def add_snapshot(self, snapshot: SnapshotStatus, record: int) -> None:
        """Add a snapshot that is durable; `record` is the ordinal of the newest record in it."""
        mark = SnapshotMark(snapshot.name, snapshot.step, record, snapshot.written_at)
        if not self.snapshots or self.snapshots[-1] != mark:
            self._write(_Line(snapshot.step, snapshot=mark))

    def _write(self, line: _Line) -> None:
        """Apply a line and append it to the file."""
        self._apply(line)
        if self._path is None:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                torn = self._fault != ""  # the failed write may have left half a line
                file.write((b"\n" if torn else b"") + orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._fault = ""
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Log a failure once: charts have a gap, and training continues."""
        fault = error.strerror or repr(error)
        if fault != self._fault:
            _log.warning(Event.HISTORY_FAILED, path=str(self._path), error=fault)
        self._fault = fault

    def _apply(self, line: _Line) -> None:
        self._published = None
        if line.point is not None:
            self._put_point(line.point)
        for segment in line.segments:
            self._put_segment(segment)
        self.dead_letters.extend(line.dead_letters)
        if line.snapshot is not None:
            if self.snapshots and self.snapshots[-1].name == line.snapshot.name:  # the same step, written again
                self.snapshots.pop()
            self.snapshots.append(line.snapshot)

    def _put_point(self, point: HistoryPoint) -> None:
        if point.batches > 1:
            self.points.put_joined(point, point.batches)
        elif self.points.last is not None and self.points.last.step == point.step:
            self.points.newest[-1] = point
        else:
            self.points.append(point)

    def _put_segment(self, segment: RegimeSegment) -> None:
        if segment.joined > 1:
            self.segments.put_joined(segment, segment.joined)
            return
        newest = self.segments.newest
        for index, known in enumerate(newest):
            if known.first_record == segment.first_record or not known.num_records:
                newest[index] = segment
                return
        if not newest or segment.first_record > newest[-1].first_record:  # an older one may have been joined
            self.segments.append(segment)

    def _point(self, outcome: BatchOutcome, status: Status) -> HistoryPoint:
        step = outcome.step
        now, seconds = self._clock.monotonic(), 0.0 if step is None else step.seconds
        elapsed_s = seconds if self._batch_ended is None else now - self._batch_ended
        self._batch_ended = now
        lags = [partition.lag for partition in status.partitions if partition.lag is not None]
        before, self._requests = self._requests, _requests(status)
        is_refused = step is not None and step.refusal is not None
        trained = None if is_refused else step
        return HistoryPoint(
            step=outcome.number,
            record=outcome.last_record,
            records=len(outcome.regimes),
            tokens=0 if trained is None else trained.tokens,
            learned_tokens=0 if trained is None else trained.learned_tokens,
            loss_sum=0.0 if trained is None else trained.loss * trained.learned_tokens,
            refusals=int(is_refused),
            dead_letters=dict(sorted(Counter(str(letter.reason) for letter in outcome.dead_lettered).items())),
            at=round(self._clock.wall(), 3),
            elapsed_s=elapsed_s,
            step_s=seconds,
            longest_step_seconds=round(seconds, 6),
            lag=sum(lags) if lags else None,
            requests=self._requests[0] - before[0],
            unexplained_requests=self._requests[1] - before[1],
            average_forgetting=status.adaptation.average_forgetting,
            backward_transfer=status.adaptation.backward_transfer,
        )

    def _segments_after(self, outcome: BatchOutcome, regimes: Sequence[RegimeStatus]) -> list[RegimeSegment]:
        """The open segment up to the end of the batch; where the stream moved, it ends and others begin."""
        last, begin = self.segments.last, outcome.first_record
        rows = [] if last is None else [last]
        if last is None or begin > last.last_record + 1:  # the history begins within a segment, or lacks lines
            rows = [_ended(row, regimes) for row in rows]
            rows += [_opened(number, begin, outcome) for number in outcome.regimes[:1] if number is not None]
        for shift in outcome.moves:
            onset = min(max(shift.onset, begin), outcome.last_record)
            rows = _extended(rows, outcome, begin, onset - 1)
            rows = [*rows[:-1], _ended(rows[-1], regimes)] if rows and rows[-1].num_records else rows[:-1]
            rows.append(_opened(shift.regime, onset, outcome))
            begin = onset
        return _extended(rows, outcome, begin, outcome.last_record)


def _opened(regime: int, first: int, outcome: BatchOutcome) -> RegimeSegment:
    return RegimeSegment(regime, first, first - 1, outcome.number, outcome.number)


def _extended(rows: list[RegimeSegment], outcome: BatchOutcome, first: int, last: int) -> list[RegimeSegment]:
    """Add the batch's records from `first` to `last` to the newest of these segments."""
    if not rows or last < first:
        return rows
    offset = outcome.first_record
    records = Counter(rows[-1].records)
    records.update(str(number) for number in outcome.regimes[first - offset : last + 1 - offset] if number is not None)
    return [*rows[:-1], replace(rows[-1], last_record=last, last_step=outcome.number, records=dict(records))]


def _ended(segment: RegimeSegment, regimes: Sequence[RegimeStatus]) -> RegimeSegment:
    """With the newest accuracy of each regime; `complete_rows` adds that of its own."""
    scored = [(regime.records, regime.number, regime.now) for regime in regimes if regime.number != segment.regime]
    largest = nlargest(MAX_MATRIX_REGIMES - 1, [row for row in scored if row[2] is not None], key=lambda row: row[0])
    ordered = sorted(largest, key=lambda row: row[1])
    accuracy = {str(number): now.accuracy for _, number, now in ordered if now is not None}
    return replace(segment, ended=True, records=_most(Counter(segment.records)), accuracy=accuracy)


def _dead_letters(outcome: BatchOutcome, at: float) -> Iterator[DeadLetterRow]:
    for (origin, offset), reason, message in outcome.dead_lettered[-MAX_DEAD_LETTERS:]:
        yield DeadLetterRow(origin.topic, origin.partition, offset, str(reason), message, at, outcome.number)


def _requests(status: Status) -> tuple[int, int]:
    """Requests answered by this process, and those of them that no regime explained."""
    unexplained = sum(number for (known, _), number in status.requests.items() if not known)
    return sum(status.requests.values()), unexplained
