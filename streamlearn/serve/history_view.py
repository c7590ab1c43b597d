"""The history as HTTP returns it: points in columns, because charts draw columns, and rows for the rest."""

from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar

from streamlearn.jobs.results import ApiModel
from streamlearn.status.history_status import (
    DeadLetterRow,
    HistoryPoint,
    HistoryStatus,
    RegimeSegment,
    SnapshotMark,
)

MAX_REGIMES = 8
"""Regimes whose records are listed in a segment."""


class PointColumns(ApiModel):
    """One entry in each column for each point, oldest first. A point is one batch, or an older stretch of several.

    Columns from `at` on depend on time as well as on the stream; the others are those of an uninterrupted run.
    """

    record: list[int]
    """Ordinal of the newest record; the horizontal axis. Records are counted from 1 over all that were trained on or
    held out, as in /v1/regimes and /v1/shifts."""
    step: list[int]
    """Step of the newest batch."""
    batches: list[int]
    """Number of batches."""
    records: list[int]
    """Number of records: trained on, held out, or measured because their regime is frozen."""
    tokens: list[int]
    """Tokens of records trained on."""
    learned_tokens: list[int]
    """Those of them that the loss is over."""
    loss: list[float | None]
    """Prequential loss: mean over the learned tokens before each update, nats per token; null where nothing was trained
    on."""
    refusals: list[int]
    """Updates refused because the loss or a gradient was not finite."""
    dead_letters: list[dict[str, int]]
    """Unusable records, by reason."""
    at: list[float]
    """End of the newest batch, Unix time."""
    tokens_per_s: list[float | None]
    """Tokens over the time since the point before, waiting for records included."""
    step_seconds: list[float]
    """Mean duration of a batch's step."""
    longest_step_seconds: list[float]
    """Duration of the longest step."""
    lag: list[int | None]
    """Largest lag in records, all partitions together; null when unknown."""
    requests: list[int]
    """Prompts and examples of requests that were answered meanwhile."""
    unexplained_requests: list[int]
    """Those of them that no regime explained."""
    sample_records: list[int]
    """Records trained on whose loss was measured under the untouched backbone too: a sample of them."""
    sample_tokens: list[int]
    """Learned tokens of those records: the weights of means over several points."""
    sample_loss: list[float | None]
    """Prequential loss of those records, mean over their learned tokens, nats per token; null where there are none."""
    backbone_loss: list[float | None]
    """Loss of the same records under the untouched backbone."""
    average_forgetting: list[float | None]
    """Mean over past regimes of best accuracy since the segment ended minus accuracy then; null before a scoring."""
    backward_transfer: list[float | None]
    """Mean over past regimes of accuracy then minus accuracy at the end of the segment; null before a scoring."""

    @classmethod
    def of(cls, points: Sequence[HistoryPoint]) -> Self:
        """The columns of these points."""
        stream, run = [point.stream for point in points], [point.run for point in points]
        return cls(
            record=[each.record for each in stream],
            step=[each.step for each in stream],
            batches=[each.batches for each in stream],
            records=[each.records for each in stream],
            tokens=[each.tokens for each in stream],
            learned_tokens=[each.learned_tokens for each in stream],
            loss=[_mean(each.loss_sum, each.learned_tokens) for each in stream],
            refusals=[each.refusals for each in stream],
            dead_letters=[dict(each.dead_letters) for each in stream],
            at=[round(each.ended_at, 3) for each in run],
            tokens_per_s=[_mean(one.tokens, other.elapsed_s, 1) for one, other in zip(stream, run, strict=True)],
            step_seconds=[_mean(other.step_s, one.batches) or 0.0 for one, other in zip(stream, run, strict=True)],
            longest_step_seconds=[round(each.longest_step_s, 6) for each in run],
            lag=[each.lag for each in run],
            requests=[each.requests for each in run],
            unexplained_requests=[each.unexplained for each in run],
            sample_records=[each.sample_records for each in run],
            sample_tokens=[each.sample_tokens for each in run],
            sample_loss=[_mean(each.sample_loss_sum, each.sample_tokens) for each in run],
            backbone_loss=[_mean(each.backbone_loss_sum, each.sample_tokens) for each in run],
            average_forgetting=[each.average_forgetting for each in run],
            backward_transfer=[each.backward_transfer for each in run],
        )


class SegmentView(ApiModel):
    """A stretch of the stream in one regime; in a long history, several short ones together."""

    regime: int
    """Number of the regime that the stream was in; of several segments, that of the longest."""
    first_record: int
    """Its first record."""
    last_record: int
    """Its last record so far."""
    first_step: int
    """Step of the batch with its first record."""
    last_step: int
    """Step of the batch with its last record."""
    joined: int
    """Number of segments that it stands for."""
    ended: bool
    """Whether the stream left it; the newest segment goes on."""
    records: dict[str, int]
    """Records by number of the regime that each was assigned to, of up to eight regimes, most first. More than one
    where producers are interleaved."""
    accuracy: dict[str, float]
    """A row of the accuracy matrix: hold-out accuracy of each regime when the segment ended, by number, as last scored
    by then. The segment's own regime is scored for it, at the latest before it is trained on again. Empty while the
    segment goes on: /v1/regimes has the present accuracies. Of many regimes, its own and the 31 largest."""

    @classmethod
    def of(cls, segment: RegimeSegment, *, ended: bool) -> Self:
        """The view of a segment."""
        return cls(
            regime=segment.regime,
            first_record=segment.first_record,
            last_record=segment.last_record,
            first_step=segment.first_step,
            last_step=segment.last_step,
            joined=segment.joined,
            ended=ended,
            records={str(number): count for number, count in segment.most_records(MAX_REGIMES)},
            accuracy={str(number): round(accuracy, 6) for number, accuracy in segment.accuracy},
        )


class DeadLetterView(ApiModel):
    """A record that became a dead letter; nothing of its content."""

    topic: str
    """Topic, or the file of a JSONL source."""
    partition: int
    """Number of the partition."""
    offset: int
    """Its offset."""
    reason: str
    """Why it is unusable."""
    message: str
    """The same for people."""
    at: float
    """When its batch was done, Unix time."""


class SnapshotMarkView(ApiModel):
    """A snapshot that was written."""

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""
    record: int
    """Ordinal of the newest record in it."""
    written_at: float
    """When it became durable, Unix time."""


class HistoryView(ApiModel):
    """The past of the run in bounded memory: at most 1,920 points and 384 segments, fewer for older records."""

    cursor: str
    """Pass it as `since` to get only what changed after this answer."""
    complete: bool
    """Whether this is the whole history, which replaces whatever the client has: always without `since`, and after a
    start or a rollback of the daemon. If not, each series holds the rows that are new or changed. They replace the
    client's points whose step is greater than `step - batches` of the first one here, and its segments that do not end
    before the first one here; dead letters and snapshots are to be appended."""
    points: PointColumns
    """The series along the stream."""
    segments: tuple[SegmentView, ...]
    """Regimes along the stream, oldest first."""
    dead_letters: tuple[DeadLetterView, ...]
    """The newest 32 unusable records, oldest first; if not complete, those since the cursor."""
    snapshots: tuple[SnapshotMarkView, ...]
    """The newest 32 snapshots, oldest first; if not complete, those since the cursor."""


class _Revised(Protocol):
    @property
    def revision(self) -> int: ...


R = TypeVar("R", bound=_Revised)


def history_view(history: HistoryStatus, since: str | None) -> HistoryView:
    """Body of /v1/history; a cursor of another start or rollback, or none, gives all of it."""
    known = _revision(history, since)
    last = history.segments[-1] if history.segments else None
    return HistoryView(
        cursor=f"{history.origin}-{history.revision}",
        complete=known is None,
        points=PointColumns.of(_after(history.points, known)),
        segments=tuple(SegmentView.of(each, ended=each is not last) for each in _after(history.segments, known)),
        dead_letters=tuple(map(_dead_letter, _after(history.dead_letters, known))),
        snapshots=tuple(map(_snapshot, _after(history.snapshots, known))),
    )


def _revision(history: HistoryStatus, cursor: str | None) -> int | None:
    """The revision that a cursor names; None if it is not one of this history."""
    origin, _, revision = (cursor or "").partition("-")
    if origin != history.origin or not revision.isdecimal() or int(revision) > history.revision:
        return None
    return int(revision)


def _after(rows: Iterable[R], known: int | None) -> list[R]:
    return [row for row in rows if known is None or row.revision > known]


def _dead_letter(row: DeadLetterRow) -> DeadLetterView:
    return DeadLetterView(
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
        reason=row.reason,
        message=row.message,
        at=round(row.at, 3),
    )


def _snapshot(mark: SnapshotMark) -> SnapshotMarkView:
    return SnapshotMarkView(name=mark.name, step=mark.step, record=mark.record, written_at=round(mark.written_at, 3))


def _mean(total: float, number: float, digits: int = 6) -> float | None:
    return round(total / number, digits) if number else None
