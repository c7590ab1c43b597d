"""Records of each regime that are never trained on.

Every `every_records`-th record of a regime is held out; a uniform sample of bounded size of them is kept (reservoir
sampling, Vitter 1985, algorithm R). A record that leaves the sample is not trained on either, since it was evaluated
before. Draws are a function of the seed, the slot and the count, so the sample depends on the stream only.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.adapters.context import NO_REGIME
from streamlearn.history import BackbonePair
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import HoldoutSettings
from streamlearn.status import Scoring
from streamlearn.stream.record import Batch, Example

Arrays = Mapping[str, NDArray[Any]]


def _without_images(example: Example, images: Sequence[bytes]) -> Example:
    raise AssertionError(f"{len(images)} images in a snapshot of a backbone that reads text, of {len(example)} tokens")


class HoldoutReservoirs:
    """One reservoir per regime slot."""

    def __init__(
        self,
        settings: HoldoutSettings,
        *,
        regimes: int,
        seed: int,
        restored: Callable[[Example, Sequence[bytes]], Example] = _without_images,
    ) -> None:
        """`restored` rebuilds an example's images from the bytes that a snapshot keeps."""
        self._settings = settings
        self._restored = restored
        self._seed = seed
        self._seen = np.zeros(regimes, dtype=np.int64)
        self._kept: dict[int, list[Example]] = {}

    def take(self, slot: int, example: Example) -> bool:
        """Count a record of the regime in `slot`; true when it is held out and must not be trained on."""
        every = self._settings.every_records
        self._seen[slot] += 1
        if every == 0 or self._seen[slot] % every:
            return False
        for image in example.images:
            image.drop_inputs()
        kept, number = self._kept.setdefault(slot, []), int(self._seen[slot]) // every
        if len(kept) < self._settings.records_per_regime:
            kept.append(example)
        else:
            place = int(np.random.default_rng([self._seed, slot, number]).integers(number))
            if place < len(kept):
                kept[place] = example
        return True

    def examples(self, slot: int) -> tuple[Example, ...]:
        """The sample of one regime; empty until a record was held out."""
        return tuple(self._kept.get(slot, ()))

    def move(self, slot: int, new: int, is_moved: Sequence[bool]) -> None:
        """Move records of one regime's sample, and as large a part of its count, to another regime's."""
        pairs = list(zip(self._kept.get(slot, []), is_moved, strict=True))
        moved = [example for example, flag in pairs if flag]
        if not moved:
            return
        self._kept[slot] = [example for example, flag in pairs if not flag]
        self._kept[new] = [*moved, *self._kept.get(new, [])][: self._settings.records_per_regime]
        number = int(self._seen[slot]) * len(moved) // len(pairs)
        self._seen[slot] -= number
        self._seen[new] += number

    def clear(self, slot: int) -> None:
        """Drop a regime's sample: its slot has another regime now, or its answers are outdated."""
        self._kept.pop(slot, None)
        self._seen[slot] = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """Plain arrays: all samples concatenated, in slot order; names are those of snapshot format 2."""
        rows = [(slot, example) for slot in sorted(self._kept) for example in self._kept[slot]]
        empty = [np.zeros(0, dtype=np.int64)]
        images = [image.data for _, example in rows for image in example.images]
        return {
            "seen": self._seen.copy(),
            "slots": np.array([slot for slot, _ in rows], dtype=np.int64),
            "lengths": np.array([len(example) for _, example in rows], dtype=np.int64),
            "input_ids": np.concatenate(empty + [example.input_ids.astype(np.int64) for _, example in rows]),
            "labels": np.concatenate(empty + [example.labels.astype(np.int64) for _, example in rows]),
            "pictures": np.array([len(example.images) for _, example in rows], dtype=np.int64),
            "picture_bytes": np.array([len(data) for data in images], dtype=np.int64),
            "picture_data": np.frombuffer(b"".join(images), dtype=np.uint8).astype(np.uint8),
        }

    def load_state(self, arrays: Arrays) -> None:
        """The inverse of `state`."""
        seen = arrays["seen"]
        self._seen[:] = 0
        self._seen[: len(seen)] = seen  # `shift.max_regimes` may have grown
        self._kept = {}
        cuts = np.cumsum(arrays["lengths"])[:-1]
        pieces = zip(
            arrays["slots"].tolist(),
            np.split(arrays["input_ids"].astype(np.int32), cuts),
            np.split(arrays["labels"].astype(np.int32), cuts),
            arrays["pictures"].tolist(),
            strict=False,  # splitting nothing gives one empty piece
        )
        images = iter(np.split(arrays["picture_data"], np.cumsum(arrays["picture_bytes"])[:-1]))
        for slot, input_ids, labels, number in pieces:
            example = Example(input_ids, labels)
            if number:
                example = self._restored(example, [bytes(next(images)) for _ in range(number)])
            self._kept.setdefault(slot, []).append(example)


# Live forgetting, measured on the hold-out records of every regime.
#
#     AF  = mean over past regimes of (best accuracy since its last segment ended - accuracy now)  (1)
#     BWT = mean over past regimes of (accuracy now - accuracy when its last segment ended)        (2)
#
# Accuracy is teacher-forced: the share of learned tokens that are the most probable ones. (1) is CP-MoE's AF and never
# negative; (2) is positive when later regimes helped (Lopez-Paz and Ranzato 2017). A past regime is one that the stream
# has left. Both start at the end of a segment: within it the sample of hold-out records still grows, and the best of
# many scores would be one of a small, lucky sample. Losses are kept too, in nats per learned token.
#
# A record whose loss is not finite is left out: trained on, it would have been a dead letter.
#
# A score holds until an update changes the experts that it was made with. Where each regime has an adapter of its own,
# that of a past regime rests: it is not scored again, and the score at its segment's end may wait for a better moment.


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


class TimeBudget:
    """Seconds earned by training and spent on other work. Idle time is free."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is the maximum fraction of the training time that may be spent."""
        self.spent_s = 0.0
        """Since the process started."""
        self._share = share
        self._training_s = 0.0
        self._clock = clock

    def trained(self, seconds: float) -> None:
        """Add the duration of a step."""
        self._training_s += seconds

    @property
    def affordable(self) -> bool:
        """Whether work may be done between two steps."""
        return self.spent_s < self._share * self._training_s

    @contextmanager
    def spending(self, *, idle: bool = False) -> Iterator[None]:
        """Count the time in the block as spent; `idle`: no record is waiting for training."""
        started = self._clock()
        try:
            yield
        finally:
            self.spent_s += 0.0 if idle else self._clock() - started


# The untouched backbone beside the model, on a sample of the records that are trained on.
#
# The model's loss of a record before it is trained on is known. The backbone's costs a forward pass, so it is measured
# for a sample: of each batch one record waits, and when the time budget allows, the newest that waits is measured.


class WaitingRecord(NamedTuple):
    """A record that was trained on."""

    example: Example
    loss: float
    """Before it was trained on, nats per learned token."""


class BackboneComparison:
    """Measuring changes nothing that training depends on. Only the thread that owns the model calls it."""

    def __init__(self, learner: Learner, settings: HoldoutSettings) -> None:
        self.budget = TimeBudget(settings.time_share / 2)
        """The other half is for scoring hold-out records."""
        self._learner = learner
        self._waiting: WaitingRecord | None = None

    def add(self, batch: Batch, step: Step) -> None:
        """Let one record of a batch wait, which `step` was made from: not always the same one of its batch."""
        self.budget.trained(step.seconds)
        if step.refusal is None:
            index = step.number % len(batch.examples)
            self._waiting = WaitingRecord(batch.examples[index], step.record_losses[index])

    def clear(self) -> None:
        """Forget the record that waits."""
        self._waiting = None

    def measure(self, *, idle: bool) -> BackbonePair | None:
        """Measure the record that waits, if there is one and the time budget allows; `idle`: no other record does."""
        if self._waiting is None or not (idle or self.budget.affordable):
            return None
        (example, loss), self._waiting = self._waiting, None
        learner = self._learner
        work = score(learner.model, [example], learner.device, pack_tokens=len(example), slots=[NO_REGIME])
        with self.budget.spending(idle=idle):
            [found] = run_to_end(work)
        return BackbonePair(1, found.tokens, loss * found.tokens, found.loss_sum)
