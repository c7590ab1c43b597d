"""Two neighbouring rows of a series made one. Sums are added, so that every mean over the joined row stays exact."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from streamlearn.status.history_status import Counts, HistoryPoint, RegimeSegment, RunFigures, StreamFigures

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
