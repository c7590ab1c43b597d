"""Hold-out records of every regime, and live forgetting as measured on them.

Every `every_records`-th record of a regime is held out and never trained on. A uniform sample of bounded size is kept
(reservoir sampling, Vitter 1985, algorithm R). A record that leaves the sample is not trained on either, since it was
evaluated before. Draws are a function of the seed, the slot and the count: the sample depends on the stream only.

    AF  = mean over past regimes of (best accuracy since its last segment ended - accuracy now)  (1)
    BWT = mean over past regimes of (accuracy now - accuracy when its last segment ended)        (2)

Accuracy is teacher-forced: the share of learned tokens that are the most probable ones. (1) is CP-MoE's AF and never
negative; (2) is positive when later regimes helped (Lopez-Paz and Ranzato 2017). A past regime is one that the stream
has left. Both start at the end of a segment: within it the sample of hold-out records still grows, and the best of many
scores would be one of a small, lucky sample. Losses are kept too, in nats per learned token.

A score holds until an update changes the experts that it was made with. Only its own records change a regime's adapter,
so a past regime with its own adapter is not scored again, and the score at its segment's end may wait for idle time.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.adapters.context import NO_REGIME
from streamlearn.codec import NOT_SAVED
from streamlearn.history import BackbonePair
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.learner import Learner, Step
from streamlearn.settings import HoldoutSettings
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.status import Scoring
from streamlearn.stream.record import Batch, Example, Truncation


class Role(StrEnum):
    """What happens to a record of a batch."""

    TRAINED = "trained"
    HELD_OUT = "held_out"
    MEASURED = "measured"
    """Its regime is frozen: its loss is measured, and it is not trained on."""


@dataclass(frozen=True)
class DividedBatch:
    """A batch whose records have roles."""

    assigned: AssignedBatch
    roles: tuple[Role, ...]

    def part(self, role: Role) -> tuple[Batch, tuple[int, ...]]:
        """Return the batch with the records of one role only, and their slots."""
        return self.assigned.without({index for index, own in enumerate(self.roles) if own is not role})

    @property
    def not_trained(self) -> frozenset[int]:
        """Indices of the records that are not trained on."""
        return frozenset(index for index, role in enumerate(self.roles) if role is not Role.TRAINED)


@dataclass
class KeptRecord:
    """A record that is kept: what is saved of an example, and the example."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    images: tuple[bytes, ...] = ()
    truncation: Truncation | None = None
    sample_type: str | None = None
    id: str = ""
    """TOPIC:PARTITION:OFFSET; empty where nobody asks for it, and in snapshots of earlier releases."""
    example: Example = field(init=False)

    def __post_init__(self) -> None:
        """Without images, these are the whole example."""
        self.example = Example(self.input_ids, self.labels, self.sample_type, truncation=self.truncation)

    @classmethod
    def from_example(cls, example: Example, id_: str = "") -> "KeptRecord":
        """Keep an example; the model's inputs of its images are computed again when they are needed."""
        images = tuple(image.data for image in example.images)
        record = cls(example.input_ids, example.labels, images, example.truncation, example.sample_type, id_)
        record.example = example
        record.drop_inputs()
        return record

    def drop_inputs(self) -> None:
        """Keep only the bytes of its images until the model's inputs are needed again."""
        for image in self.example.images:
            image.drop_inputs()


@dataclass
class Reservoir:
    """A uniform sample of one regime's records: of those held out, or of those trained on."""

    seen: int = 0
    """Records of the regime so far."""
    records: list[KeptRecord] = field(default_factory=list)

    @property
    def examples(self) -> tuple[Example, ...]:
        """The sample."""
        return tuple(record.example for record in self.records)

    def take(self, example: Example, seed: tuple[int, ...], *, size: int, every: int = 1, id_: str = "") -> bool:
        """Count a record, and return whether it is one of every `every`, of which at most `size` are kept."""
        self.seen += 1
        if every == 0 or self.seen % every:
            return False
        record, number = KeptRecord.from_example(example, id_), self.seen // every
        if len(self.records) < size:
            self.records.append(record)
        else:
            place = int(np.random.default_rng([*seed, number]).integers(number))
            if place < len(self.records):
                self.records[place] = record
        return True

    def draw(self, share: float, new: int, seed: tuple[int, ...]) -> list[Example]:
        """Draw as many records as are `share` of all, together with the next `new` ones of the regime.

        The remainder is carried over: at 0.25, every third new record brings an earlier one, however small the batches.
        """
        ratio = share / (1 - share)
        number = int(ratio * (self.seen + new)) - int(ratio * self.seen)
        size = min(number, len(self.records))
        generator = np.random.default_rng([*seed, self.seen])
        places = generator.choice(len(self.records), size, replace=False) if size else ()
        return [self.records[place].example for place in places]

    def move(self, new: "Reservoir", is_moved: Sequence[bool], *, size: int) -> None:
        """Move records, and as large a part of the count, to the sample of another regime."""
        pairs = list(zip(self.records, is_moved, strict=True))
        moved = [record for record, flag in pairs if flag]
        if not moved:
            return
        self.records = [record for record, flag in pairs if not flag]
        new.records = [*moved, *new.records][:size]
        number = self.seen * len(moved) // len(pairs)
        self.seen -= number
        new.seen += number


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
    """Its segment ended, and the score for that is still to be made, before it is trained on again."""
    not_finite_at: int = field(default=-1, metadata=NOT_SAVED)
    """Step after which no record had a finite loss, so that there is no score; -1: there is none."""

    def end(self) -> None:
        """A segment ended of a regime with its own adapter: the next score is the one at the end."""
        self.ended, self.at_end, self.best_accuracy = True, None, None

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
    """Scores regimes. Scoring changes nothing that training depends on."""

    def __init__(self, learner: Learner, *, pack_tokens: int) -> None:
        self._learner = learner
        self._pack_tokens = pack_tokens

    def holds(self, history: ScoreHistory) -> bool:
        """Whether the newest score is of the present weights."""
        changed_at = history.trained_at if self._learner.per_regime else self._learner.number
        return not history.ended and history.tried_at >= changed_at

    def measure(
        self, history: ScoreHistory, slot: int, examples: Sequence[Example], *, at_end: bool = False
    ) -> Scoring | None:
        """Score the hold-out records of the regime in `slot`; None if none of them has a finite loss.

        A record whose loss is not finite is left out: trained on, it would have been a dead letter.
        """
        work = self._learner.score(examples, [slot] * len(examples), pack_tokens=self._pack_tokens)
        scores = [result for result in run_to_end(work) if math.isfinite(result.loss_sum)]
        if not scores:
            history.skip(self._learner.number)
            return None
        tokens = sum(result.tokens for result in scores)
        point = Scoring(
            self._learner.number,
            sum(result.loss_sum for result in scores) / tokens,
            sum(result.correct for result in scores) / tokens,
        )
        history.add(point, at_end=at_end)
        return point

    def average_forgetting(self, past: Iterable[ScoreHistory]) -> float | None:
        """Eq. (1); None until there is a past regime whose loss of accuracy is known."""
        drops = [best - now.accuracy for best, _, now in self._past(past)]
        return fmean(drops) if drops else None

    def backward_transfer(self, past: Iterable[ScoreHistory]) -> float | None:
        """Eq. (2); None as with eq. (1)."""
        gains = [now.accuracy - at_end.accuracy for _, at_end, now in self._past(past)]
        return fmean(gains) if gains else None

    def _past(self, histories: Iterable[ScoreHistory]) -> Iterator[tuple[float, Scoring, Scoring]]:
        """Best accuracy, score at the end of the last segment, and newest score.

        Where regimes share experts the newest must be later; an adapter of one regime has not changed by itself.
        """
        for history in histories:
            best, at_end, now = history.best_accuracy, history.at_end, history.now
            if best is None or at_end is None or now is None:
                continue
            if self._learner.per_regime or now.step > at_end.step:
                yield best, at_end, now


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


class WaitingRecord(NamedTuple):
    """A record that was trained on."""

    example: Example
    loss: float
    """Before it was trained on, nats per learned token."""


class BackboneComparison:
    """Loss of the untouched backbone next to the model's, on a sample of the records that are trained on.

    The model's loss of a record before it is trained on is known. The backbone's costs a forward pass, so of each batch
    one record waits, and the newest that waits is measured when the time budget allows. Measuring changes nothing that
    training depends on.
    """

    def __init__(self, learner: Learner, settings: HoldoutSettings) -> None:
        self.budget = TimeBudget(settings.time_share / 2)
        """The other half is for scoring hold-out records."""
        self._learner = learner
        self._waiting: WaitingRecord | None = None

    def add(self, batch: Batch, step: Step) -> None:
        """Let one record of the batch of a step wait, at another place in each batch."""
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
            [result] = run_to_end(work)
        return BackbonePair(1, result.tokens, loss * result.tokens, result.loss_sum)
