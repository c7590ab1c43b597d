"""The past of the run, in bounded memory: a point for each batch, thinned with age, and a segment for each regime.

The loop hands over values after each batch and reads nothing back. A snapshot holds the history, so a restart and a
rollback continue it; `StreamFigures` and the segments' extents are those of an uninterrupted run then.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest

from streamlearn.history.backbone_pair import BackbonePair
from streamlearn.history.batch_outcome import BatchOutcome
from streamlearn.history.joined import MAX_REGIMES_IN_SEGMENT, joined_points, joined_segments
from streamlearn.history.thinned_series import ThinnedSeries
from streamlearn.status.board import Clock
from streamlearn.status.history_status import (
    Counts,
    DeadLetterRow,
    HistoryPoint,
    HistoryStatus,
    RegimeSegment,
    RunFigures,
    SnapshotMark,
    StreamFigures,
)
from streamlearn.status.status import RegimeStatus, SnapshotStatus, Status

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
