"""Batches that are done, without a model."""

from collections.abc import Sequence
from dataclasses import replace

from streamlearn.board import Clock
from streamlearn.errors import Reason
from streamlearn.history import BatchOutcome, History
from streamlearn.learner.learner import Step
from streamlearn.shift.detector import Shift
from streamlearn.status import AdaptationStatus, Phase, RegimeStatus, Scoring, Status
from streamlearn.stream.position import RecordId, TopicPartition
from streamlearn.stream.record import Batch, DeadLetteredRecord

PER_BATCH = 4
TOPIC = TopicPartition("orders", 0)
STATUS = Status(Phase.RUNNING)


class HandClock:
    """A clock set by hand; wall time is a million seconds ahead of monotonic time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(lambda: self.now, lambda: 1_000_000.0 + self.now)


def stepped(number: int, *, refusal: str | None = None) -> Step:
    return Step(
        number=number,
        loss=float("inf") if refusal else 2.0 + number % 5,
        record_losses=(2.0,) * PER_BATCH,
        tokens=40,
        learned_tokens=10 + number % 3,
        grad_norm=1.0,
        seconds=0.5,
        refusal=refusal,
    )


def shift(regime: int, onset: int, *, parent: int | None = None) -> Shift:
    return Shift("inputs", 1, regime, regime, False, None, onset + 2, onset, 2.0, 1.0, parent)


def outcome(number: int, regimes: Sequence[int | None] = (1,) * PER_BATCH, **fields: object) -> BatchOutcome:
    done = BatchOutcome(
        batch=Batch((), ()),
        shifts=(),
        regimes=tuple(regimes),
        last_record=number * PER_BATCH,
        number=number,
        step=stepped(number),
    )
    return replace(done, **fields)  # type: ignore[arg-type]


def unusable(offset: int, reason: Reason = Reason.EMPTY) -> DeadLetteredRecord:
    return DeadLetteredRecord(RecordId(TOPIC, offset), reason, f"unusable at {offset}")


def scored(*accuracies: float) -> Status:
    """Regimes 1, 2, ... with these hold-out accuracies, now and at the ends of their segments."""
    regimes = tuple(
        RegimeStatus(number, number, records=100, history=(Scoring(1, 1.0, accuracy),), end_accuracy=accuracy)
        for number, accuracy in enumerate(accuracies, start=1)
    )
    return replace(STATUS, adaptation=AdaptationStatus(regimes=regimes))


def history_of(num_batches: int, hand: HandClock | None = None) -> History:
    """A history of this many batches, one a second, in which the regime changes every ten."""
    hand = hand or HandClock()
    history = History(hand.clock)
    for number in range(1, num_batches + 1):
        hand.now += 1.0
        regime = (number - 1) // 10 + 1
        begins = (shift(regime, (number - 1) * PER_BATCH + 1),) if number % 10 == 1 else ()
        bad = Batch((), (), (unusable(number),)) if number % 7 == 0 else Batch((), ())
        history.add(outcome(number, (regime,) * PER_BATCH, shifts=begins, batch=bad), scored(0.5, 0.25))
    return history
