"""A client's copy of `/v1/history`, kept up to date by what changed."""

from collections.abc import Sequence
from typing import Any

import orjson

from streamlearn.serve.history_view import DeadLetterView, HistoryView, PointColumns, SegmentView

MAX_DEAD_LETTERS = 32


class HistoryCopy:
    """Everything that the answers so far add up to."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self.points = PointColumns.of(())
        self.segments: list[SegmentView] = []
        self.dead_letters: list[DeadLetterView] = []

    @property
    def path(self) -> str:
        """What to ask for next."""
        return "/v1/history" if self.cursor is None else f"/v1/history?since={self.cursor}"

    def update(self, body: bytes) -> None:
        """Add an answer to `path`."""
        answer = HistoryView.model_validate(orjson.loads(body))
        if answer.complete:
            self.points, self.segments = answer.points, list(answer.segments)
            self.dead_letters = list(answer.dead_letters)
        else:
            self.points = _joined(self.points, answer.points)
            self.segments = [*_before(self.segments, answer.segments), *answer.segments]
            self.dead_letters = [*self.dead_letters, *answer.dead_letters][-MAX_DEAD_LETTERS:]
        self.cursor = answer.cursor


def _joined(old: PointColumns, new: PointColumns) -> PointColumns:
    """The old points before the first new one, and the new ones."""
    if not new.step:
        return old
    begin = new.step[0] - new.batches[0]
    kept = sum(step <= begin for step in old.step)
    columns: dict[str, list[Any]] = {
        name: [*getattr(old, name)[:kept], *getattr(new, name)] for name in PointColumns.model_fields
    }
    return PointColumns(**columns)


def _before(old: Sequence[SegmentView], new: Sequence[SegmentView]) -> list[SegmentView]:
    return [each for each in old if not new or each.last_record < new[0].first_record]
