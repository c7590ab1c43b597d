"""Rows of the run's past, as `/v1/history` returns them and the page draws them; `history` keeps them."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, computed_field

FIELD_DOCS = ConfigDict(use_attribute_docstrings=True, extra="forbid")
"""Pydantic configuration of rows that HTTP returns unchanged: docstrings become descriptions in OpenAPI."""


def mean(total: float, number: float, digits: int = 6) -> float | None:
    """Rounded mean; None of nothing."""
    return round(total / number, digits) if number else None


Sum = Annotated[float, Field(exclude=True)]
"""Kept to join points, and not shown: a mean is."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One batch, or the sums over consecutive ones. Each value is a column of /v1/history.

    Values before `at` depend on the stream only, so a replay repeats them bit for bit.
    """

    __pydantic_config__ = FIELD_DOCS

    step: int
    """Step of the newest batch."""
    record: int
    """Ordinal of the newest record; the horizontal axis. Records are counted from 1 over all that were trained on or
    held out, as in /v1/regimes and /v1/shifts."""
    batches: int = 1
    """Number of batches."""
    records: int = 0
    """Number of records: trained on, held out, or measured because their regime is frozen."""
    tokens: int = 0
    """Tokens of records trained on."""
    learned_tokens: int = 0
    """Tokens that the loss is over."""
    loss_sum: Sum = 0.0
    refusals: int = 0
    """Updates refused because the loss or a gradient was not finite."""
    dead_letters: dict[str, int] = field(default_factory=dict)
    """Unusable records, by reason."""
    at: float = 0.0
    """End of the newest batch, Unix time."""
    elapsed_s: Sum = 0.0
    """Time since the batch before, waiting for records included."""
    step_s: Sum = 0.0
    longest_step_seconds: float = 0.0
    """Duration of the longest step."""
    lag: int | None = None
    """Largest lag in records, all partitions together; null when unknown."""
    requests: int = 0
    """Prompts and examples of requests that were answered meanwhile."""
    unexplained_requests: int = 0
    """Requests among them that no regime explained."""
    sample_records: int = 0
    """Records trained on whose loss was measured under the untouched backbone too: a sample of them."""
    sample_tokens: int = 0
    """Learned tokens of those records: the weights of means over several points."""
    sample_loss_sum: Sum = 0.0
    backbone_loss_sum: Sum = 0.0
    average_forgetting: float | None = None
    """Mean over past regimes of best accuracy since the segment ended minus accuracy then; null before a scoring."""
    backward_transfer: float | None = None
    """Mean over past regimes of accuracy then minus accuracy at the end of the segment; null before a scoring."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def loss(self) -> float | None:
        """Mean over the learned tokens before each update, nats per token; null where nothing was trained on."""
        return mean(self.loss_sum, self.learned_tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_s(self) -> float | None:
        """Tokens over the time since the point before, waiting for records included."""
        return mean(self.tokens, self.elapsed_s, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def step_seconds(self) -> float:
        """Mean duration of a batch's step."""
        return mean(self.step_s, self.batches) or 0.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sample_loss(self) -> float | None:
        """Prequential loss of the sample's records, mean over their learned tokens, nats per token; null of none."""
        return mean(self.sample_loss_sum, self.sample_tokens)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def backbone_loss(self) -> float | None:
        """Loss of the same records under the untouched backbone."""
        return mean(self.backbone_loss_sum, self.sample_tokens)


RegimeKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,18}$")]
"""Number of a regime, as a key in JSON."""


@dataclass(frozen=True, slots=True)
class RegimeSegment:
    """A stretch of the stream in one regime; in a long history, several short ones together."""

    __pydantic_config__ = FIELD_DOCS

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
    joined: int = 1
    """Number of segments that it stands for."""
    ended: bool = False
    """Whether the stream left it; the newest segment is open."""
    records: dict[RegimeKey, int] = field(default_factory=dict)
    """Records by number of the regime that each was assigned to, of up to eight regimes, most first. More than one
    where producers are interleaved."""
    accuracy: dict[RegimeKey, float] = field(default_factory=dict)
    """A row of the accuracy matrix: hold-out accuracy of each regime when the segment ended, by number, as last scored
    by then. The segment's own regime is scored for it, at the latest before it is trained on again. Empty while the
    segment is open: /v1/regimes has the present accuracies. Of many regimes, its own and the 31 largest."""

    @property
    def num_records(self) -> int:
        return self.last_record - self.first_record + 1


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A record that became a dead letter; nothing of its content."""

    __pydantic_config__ = FIELD_DOCS

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
    step: int
    """Step of its batch."""


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """A snapshot that was written."""

    __pydantic_config__ = FIELD_DOCS

    name: str
    """Name of its folder."""
    step: int
    """Optimizer updates in it."""
    record: int
    """Ordinal of the newest record in it."""
    written_at: float
    """When it became durable, Unix time."""


@dataclass(frozen=True, slots=True)
class HistoryStatus:
    """The history at one moment; every series is oldest first."""

    points: tuple[HistoryPoint, ...] = ()
    segments: tuple[RegimeSegment, ...] = ()
    dead_letters: tuple[DeadLetterRow, ...] = ()
    """The newest."""
    snapshots: tuple[SnapshotMark, ...] = ()
    """The newest."""
