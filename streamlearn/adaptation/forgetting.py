"""Live forgetting, measured on the hold-out records of every regime.

    AF  = mean over past regimes of (best accuracy since its last segment ended - accuracy now)  (1)
    BWT = mean over past regimes of (accuracy now - accuracy when its last segment ended)        (2)

Accuracy is teacher-forced: the share of learned tokens that are the most probable ones. (1) is CP-MoE's AF and never
negative; (2) is positive when later regimes helped (Lopez-Paz and Ranzato 2017). A past regime is one that the stream
has left. Both start at the end of a segment: within it the sample of hold-out records still grows, and the best of many
scores would be one of a small, lucky sample. Losses are kept too, in nats per learned token.

A record whose loss is not finite is left out: trained on, it would have been a dead letter.

A score holds until an update changes the experts that it was made with. Where each regime has an adapter of its own,
that of a past regime rests: it is not scored again, and the score at its segment's end may wait for a better moment.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from streamlearn.learner.evaluation import run_to_end
from streamlearn.learner.learner import Learner
from streamlearn.status.status import Scoring
from streamlearn.stream.decode import Example

MAX_POINTS = 64  # scores kept per regime; at this number every other one is dropped


@dataclass
class ScoreHistory:
    """The scores of one regime, oldest first."""

    points: list[Scoring] = field(default_factory=list)
    best_accuracy: float | None = None
    """Since its last segment ended; None before."""
    at_end: Scoring | None = None
    """The score when its last segment ended."""
    trained_at: int = 0
    """Step of the last update with one of its records."""
    ended: bool = False
    """Its segment ended, and the score for that is still to be made."""
    not_finite_at: int = -1
    """Step after which no record had a finite loss, so that there is no score; -1: there is none. Not saved."""

    def add(self, point: Scoring, *, at_end: bool) -> None:
        """Add the newest score."""
        if len(self.points) == MAX_POINTS:
            del self.points[1::2]
        self.points.append(point)
        if at_end:
            self.at_end, self.best_accuracy, self.ended = point, point.accuracy, False
        elif self.best_accuracy is not None:
            self.best_accuracy = max(self.best_accuracy, point.accuracy)

    def skip(self, step: int) -> None:
        """There is no score after this step."""
        self.not_finite_at, self.ended = step, False

    @property
    def now(self) -> Scoring | None:
        """The newest score."""
        return self.points[-1] if self.points else None

    @property
    def tried_at(self) -> int:
        """Step after which it was scored last, or had no finite loss; -1: never."""
        return max(self.not_finite_at, -1 if self.now is None else self.now.step)


class Forgetting:
    """Scores one regime at a time and keeps the history. Scoring changes nothing that training depends on."""

    def __init__(self, learner: Learner, *, pack_tokens: int) -> None:
        self.histories: dict[int, ScoreHistory] = {}
        """By slot."""
        self._learner = learner
        self._pack_tokens = pack_tokens

    def trained(self, slots: Collection[int]) -> None:
        """An update was made with records of these regimes."""
        for slot in slots:
            self.histories.setdefault(slot, ScoreHistory()).trained_at = self._learner.number

    def end(self, slot: int) -> None:
        """A segment ended of a regime with an adapter of its own: its next score is the one at the end."""
        history = self.histories.setdefault(slot, ScoreHistory())
        history.ended, history.at_end, history.best_accuracy = True, None, None

    def has_ended(self, slot: int) -> bool:
        """Whether the score at the end of the regime's segment is still to be made, before it is trained on again."""
        return slot in self.histories and self.histories[slot].ended

    def stalest(self, slots: Collection[int]) -> int | None:
        """The regime to score next: one whose segment ended, or that scored longest ago; None when all scores hold."""

        def urgency(slot: int) -> tuple[bool, int]:
            history = self.histories.get(slot, ScoreHistory())
            return not history.ended, history.tried_at

        stale = [slot for slot in sorted(slots) if not self._holds(self.histories.get(slot, ScoreHistory()))]
        return min(stale, key=urgency, default=None)

    def _holds(self, history: ScoreHistory) -> bool:
        """Whether the newest score is of the present weights."""
        changed_at = history.trained_at if self._learner.per_regime else self._learner.number
        return not history.ended and history.tried_at >= changed_at

    def measure(self, slot: int, examples: Sequence[Example], *, at_end: bool = False) -> Scoring | None:
        """Score one regime's hold-out records with its own bias; None if none of them has a finite loss."""
        work = self._learner.score(examples, [slot] * len(examples), pack_tokens=self._pack_tokens)
        scores = [each for each in run_to_end(work) if math.isfinite(each.loss_sum)]
        history = self.histories.setdefault(slot, ScoreHistory())
        if not scores:
            history.skip(self._learner.number)
            return None
        tokens = sum(each.tokens for each in scores)
        point = Scoring(
            self._learner.number,
            sum(each.loss_sum for each in scores) / tokens,
            sum(each.correct for each in scores) / tokens,
        )
        history.add(point, at_end=at_end)
        return point

    def forget(self, slot: int) -> None:
        """Drop a history: the slot has another regime, or its hold-out answers are outdated."""
        self.histories.pop(slot, None)

    def average_forgetting(self, past: Collection[int]) -> float | None:
        """Eq. (1); None until there is a past regime whose loss of accuracy is known."""
        drops = [best - now.accuracy for best, _, now in self._left(past)]
        return fmean(drops) if drops else None

    def backward_transfer(self, past: Collection[int]) -> float | None:
        """Eq. (2); None as with eq. (1)."""
        gains = [now.accuracy - at_end.accuracy for _, at_end, now in self._left(past)]
        return fmean(gains) if gains else None

    def _left(self, slots: Collection[int]) -> Iterator[tuple[float, Scoring, Scoring]]:
        """Best accuracy, score at the end of the last segment, and newest score.

        Where regimes share experts the newest must be later; an adapter of its own has changed nothing by itself.
        """
        for history in (self.histories[slot] for slot in sorted(slots) if slot in self.histories):
            best, at_end, now = history.best_accuracy, history.at_end, history.now
            if best is None or at_end is None or now is None:
                continue
            if self._learner.per_regime or now.step > at_end.step:
                yield best, at_end, now

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        rows = {str(slot): asdict(history) for slot, history in self.histories.items()}
        for row in rows.values():
            del row["not_finite_at"]
        return rows

    def load_json(self, rows: dict[str, Any]) -> None:
        """The inverse of `to_json`."""
        self.histories = {
            int(slot): ScoreHistory(
                [Scoring(**point) for point in row["points"]],
                row["best_accuracy"],
                None if row["at_end"] is None else Scoring(**row["at_end"]),
                row.get("trained_at", self._learner.number),  # older snapshots: none
                row.get("ended", False),
            )
            for slot, row in rows.items()
        }
