"""A trained method and its measurements, before the scores are computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.learn.evaluator import SlotsOf
from benchmarks.learn.recorder import RunRecorder
from streamlearn.daemon.model import Model

Progress = Callable[[str], None]
"""Receives a short text about how far a run is."""


@dataclass(frozen=True)
class TrainedMethod:
    """A trained model and the measurements taken while it was trained."""

    recorder: RunRecorder
    model: Model
    slots_of: SlotsOf
    detection: dict[str, Any] | None
    """Detected boundaries; None for a method that is given them."""
