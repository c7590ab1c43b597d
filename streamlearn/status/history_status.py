"""What is published about the past of the run: points, segments, the newest dead letters and snapshots.

A row's `revision` is that of `HistoryStatus` when the row changed last, so a reader that knows a revision asks for the
rows after it. It never decreases along a series.
"""

from dataclasses import dataclass

Counts = tuple[tuple[str, int], ...]
"""Numbers by name, sorted by name."""


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Sums over consecutive batches that depend on the stream only: a replay repeats them bit for bit."""

    step: int
    """Step of the newest batch."""
    record: int
    """Ordinal of the newest record; records are counted from 1 over all that were trained on or held out."""
    batches: int = 1
    records: int = 0
    """Records that were trained on, held out, or only measured because their regime is frozen."""
    tokens: int = 0
    """Tokens of records trained on."""
    learned_tokens: int = 0
    """Those of them that the loss is over."""
    loss_sum: float = 0.0
    """Prequential loss, summed over the learned tokens, nats."""
    refusals: int = 0
    """Updates refused because the loss or a gradient was not finite."""
    dead_letters: Counts = ()
    """Unusable records, by reason."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of the same batches that also depend on when they were taken: times, lag, requests, what was scored."""

    ended_at: float
    """End of the newest batch, Unix time."""
    elapsed_s: float = 0.0
    """Time since the batch before, waiting for records included; 0 for the first batch of a process."""
    step_s: float = 0.0
    """Duration of the steps."""
    longest_step_s: float = 0.0
    """Duration of the longest step."""
    lag: int | None = None
    """Largest lag, all partitions together; None when unknown."""
    requests: int = 0
    """Prompts and examples of requests that were answered meanwhile."""
    unexplained: int = 0
    """Those of them that no regime explained."""
    sample_records: int = 0
    """Records trained on whose loss was measured under the untouched backbone too."""
    sample_tokens: int = 0
    """Their learned tokens."""
    sample_loss_sum: float = 0.0
    """Their prequential loss, summed over their learned tokens, nats."""
    backbone_loss_sum: float = 0.0
    """That of the untouched backbone on the same tokens."""
    average_forgetting: float | None = None
    """At the end of the newest batch."""
    backward_transfer: float | None = None
    """At the end of the newest batch."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One batch, or consecutive batches together."""

    stream: StreamFigures
    run: RunFigures
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RegimeSegment:
    """A stretch of the stream in one regime; in a long history, several that were joined."""

    regime: int
    """Number of the regime that the stream was in; of joined ones, that of the longest."""
    first_record: int
    last_record: int
    first_step: int
    last_step: int
    joined: int = 1
    """Number of segments that it stands for."""
    records: tuple[tuple[int, int], ...] = ()
    """Records by number of the regime that each was assigned to; once it ended, those with the most, most first."""
    accuracy: tuple[tuple[int, float], ...] = ()
    """Newest hold-out accuracy of each regime at the end of the segment, by number: a row of the accuracy matrix. Empty
    while it goes on. Of many regimes, those with the most records."""
    revision: int = 0

    @property
    def num_records(self) -> int:
        """Its length."""
        return self.last_record - self.first_record + 1

    def most_records(self, number: int) -> tuple[tuple[int, int], ...]:
        """The regimes with the most records, most first, and of equal ones the older first."""
        return tuple(sorted(self.records, key=lambda row: (-row[1], row[0]))[:number])


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A record that became a dead letter; nothing of its content."""

    topic: str
    partition: int
    offset: int
    reason: str
    message: str
    """For people."""
    at: float
    """When its batch was done, Unix time."""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """A snapshot that was written."""

    name: str
    step: int
    record: int
    """Ordinal of the newest record in it."""
    written_at: float
    """Unix time."""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class HistoryStatus:
    """The history at one moment; every series is oldest first."""

    origin: str = ""
    """Another one after each start and rollback, because revisions begin again."""
    revision: int = 0
    points: tuple[HistoryPoint, ...] = ()
    segments: tuple[RegimeSegment, ...] = ()
    dead_letters: tuple[DeadLetterRow, ...] = ()
    """The newest."""
    snapshots: tuple[SnapshotMark, ...] = ()
    """The newest."""
