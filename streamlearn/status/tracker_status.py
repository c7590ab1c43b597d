"""What is published about an experiment tracker."""

from dataclasses import dataclass

from streamlearn.status.field_docs import FIELD_DOCS


@dataclass(frozen=True, slots=True)
class TrackerStatus:
    """One tracker, as seen by this process."""

    __pydantic_config__ = FIELD_DOCS

    name: str
    """tensorboard or mlflow."""
    step: int | None = None
    """Newest step that was written; null before the first."""
    pending: int = 0
    """Samples that wait to be written."""
    dropped: int = 0
    """Samples that were left out because too many waited."""
    failures: int = 0
    """Failed attempts to write."""
    fault: str | None = None
    """Why the last attempt failed; null if it did not."""
