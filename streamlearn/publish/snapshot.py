"""A snapshot as the publisher reads it: each regime's weights and hold-out records, and the routing state.

Everything comes from the files of the snapshot, so the thread that owns the model is not asked and cannot have moved
on.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from streamlearn.adapters.presets import HeadLoraConfig, regime_adapter
from streamlearn.backbone.lora import PlainLora
from streamlearn.export.formats import BaseModel, regime_lora
from streamlearn.regimes.regime import RegimesState
from streamlearn.snapshot.parts import Snapshot
from streamlearn.stream.record import Example

_WEIGHTS = "adapter/{}/adapter_model.safetensors"


@dataclass(frozen=True)
class RegimeOfSnapshot:
    """One regime with an adapter of its own."""

    slot: int
    number: int
    label: str | None
    """The operator's name for it."""
    weights_sha256: str
    """Of the file with its weights."""
    records: int
    visits: int
    is_suspected: bool
    """Whether its answers may have changed, which is not confirmed yet."""
    refused_return: int | None
    """Number of the regime that its first records looked like; by their losses they were another's, or changed."""
    approved_at: int | None
    """Step at which an operator let it be published although its answers changed."""


class SnapshotRegimes:
    """The regimes of one snapshot. Its methods raise SnapshotError where a file is gone or damaged."""

    def __init__(self, snapshot: Snapshot, config: HeadLoraConfig, base: BaseModel) -> None:
        self.snapshot = snapshot
        self._config = config
        self._base = base

    @property
    def step(self) -> int:
        """Optimizer updates in it."""
        return self.snapshot.manifest.step

    @property
    def regimes(self) -> list[RegimeOfSnapshot]:
        """Those that have learned something, by number."""
        files = self.snapshot.manifest.files
        suspected = {shift.regime for shift in self.state.suspected}
        regimes = [
            RegimeOfSnapshot(
                slot=slot,
                number=regime.number,
                label=regime.name or None,
                weights_sha256=files[_WEIGHTS.format(regime_adapter(slot))].sha256,
                records=regime.records,
                visits=regime.visits,
                is_suspected=regime.number in suspected,
                refused_return=regime.refused_return,
                approved_at=regime.approved_at,
            )
            for slot, regime in self.state.regimes.items()
            if _WEIGHTS.format(regime_adapter(slot)) in files
        ]
        return sorted(regimes, key=lambda regime: regime.number)

    def lora(self, slot: int) -> PlainLora:
        """Read a regime's weights, without the start."""
        return regime_lora(self.snapshot, regime_adapter(slot), self._config, self._base)

    def holdouts(self, slot: int) -> dict[str, Example]:
        """The hold-out records of a regime, by the digest of their tokens."""
        return {digest(example): example for example in self.state.regimes[slot].holdouts.examples}

    @cached_property
    def state(self) -> RegimesState:
        """Regimes, hold-out records and the monitor's state."""
        return self.snapshot.component("regimes", RegimesState)


def digest(example: Example) -> str:
    """Identify a record by its tokens and labels."""
    tokens = np.concatenate([example.input_ids, example.labels]).astype("<i4")
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:32]
