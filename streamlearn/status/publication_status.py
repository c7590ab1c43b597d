"""What is published about publications: versions by regime, what was held back, and the replicas."""

from dataclasses import dataclass

from streamlearn.status.field_docs import FIELD_DOCS

HELD_BACK = (
    "too_few_records",
    "worse_than_backbone",
    "worse_than_published",
    "answers_changed",
    "not_loaded",
)
"""Why a version is not published, see `publish.gate.HeldBack`."""


@dataclass(frozen=True, slots=True)
class RegimePublication:
    """What is published of a regime, and what the gate found about its newest version."""

    __pydantic_config__ = FIELD_DOCS

    number: int
    """Number of the regime."""
    version: str | None
    """Name of the published version; null if there is none, and then the untouched backbone answers."""
    held_back: str | None = None
    """Why the newest version is not published: too_few_records, worse_than_backbone, worse_than_published,
    answers_changed or not_loaded; null if it is."""
    step: int | None = None
    """Optimizer updates in the newest version that was tested; the figures below are of it."""
    records: int | None = None
    """Hold-out records of the comparison that decided."""
    loss: float | None = None
    """Mean loss over those records, nats per token."""
    published_loss: float | None = None
    """That of the published version on the same records; null if the regime had none."""
    backbone_loss: float | None = None
    """That of the untouched backbone on all hold-out records."""
    p_value: float | None = None
    """Smallest p-value of the tests that it is no worse; it is held back at or below publish.level."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One model server."""

    __pydantic_config__ = FIELD_DOCS

    url: str
    is_up: bool
    """Whether it answered when it was last asked."""
    loaded: int
    """Published versions that it has loaded."""
    wanted: int
    """Versions that it should have loaded."""
    fault: str | None = None
    """Why it is away, or what it refused; null when nothing is wrong."""


@dataclass(frozen=True, slots=True)
class PublicationStatus:
    """The newest publication, and what is under way."""

    __pydantic_config__ = FIELD_DOCS

    sequence: int | None = None
    """Number of the newest publication; null before the first."""
    snapshot: str | None = None
    """Snapshot that its routing state is from."""
    written_at: float | None = None
    """Unix time."""
    regimes: tuple[RegimePublication, ...] = ()
    """By number."""
    replicas: tuple[ReplicaStatus, ...] = ()
    """In the order of publish.vllm.replicas."""
    num_published: int = 0
    """Versions published by this process."""
    num_held_back: tuple[tuple[str, int], ...] = ()
    """Versions held back by this process, by reason."""
    fault: str | None = None
    """Why the newest snapshot could not be published yet; null when nothing is wrong."""
