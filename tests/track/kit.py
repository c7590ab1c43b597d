"""Statuses of a run, and trackers that fail on demand."""

from collections.abc import Sequence
from dataclasses import replace

from streamlearn.status import AdaptationStatus, PartitionStatus, Phase, RegimeStatus, Scoring, ShiftStatus, Status
from streamlearn.stream.record import TopicPartition
from streamlearn.track import TrackedSample, TrackError

SHIFT = ShiftStatus("inputs", 1, 2, False, 1, 40, 38, 0.5, 0.2, None, None, 10, 100, 0.1, None)


def status(step: int, *scorings: Scoring, shifts: Sequence[ShiftStatus] = ()) -> Status:
    """A run in its second regime, whose hold-out records were scored so."""
    regimes = (
        RegimeStatus(1, 0, history=tuple(scorings)),
        RegimeStatus(2, 1, current=True, prequential_loss=1.5),
    )
    adaptation = AdaptationStatus(regimes, tuple(shifts), average_forgetting=0.25)
    origin = TopicPartition("t", 0)
    return replace(
        Status(Phase.RUNNING, step=step, loss=2.0, loss_smoothed=2.5, learning_rate=0.003, tokens_per_s=90.0),
        adaptation=adaptation,
        partitions=(PartitionStatus(origin, 8, 3), PartitionStatus(TopicPartition("t", 1), 8, 4)),
    )


class ListTracker:
    """Keeps what is written; fails as often as it is told to."""

    name = "list"

    def __init__(self, failures: int = 0) -> None:
        self.samples: list[TrackedSample] = []
        self.failures = failures
        self.finished: bool | None = None

    def write(self, samples: Sequence[TrackedSample]) -> None:
        """Keep them, or fail."""
        if self.failures:
            self.failures -= 1
            raise TrackError("the server must answer")
        self.samples += samples

    def close(self, *, finished: bool) -> None:
        """Keep how the run ended."""
        self.finished = finished
