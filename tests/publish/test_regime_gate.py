"""The gate over snapshots: what it remembers of one regime is of its weights, never of others."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from streamlearn.publish.gate import Gate
from streamlearn.publish.regime_gate import RegimeGate
from streamlearn.publish.snapshot import RegimeOfSnapshot
from streamlearn.status import RegimePublication
from tests.publish.test_publication_files import version


@dataclass
class StubSnapshot:
    """A snapshot of one regime without hold-out records, so nothing is scored."""

    step: int
    weights: str

    @property
    def regimes(self) -> list[RegimeOfSnapshot]:
        return [
            RegimeOfSnapshot(
                slot=0,
                number=1,
                label=None,
                weights_sha256=self.weights,
                records=1,
                visits=1,
                is_suspected=False,
                refused_return=None,
                approved_at=None,
            )
        ]

    def holdouts(self, slot: int) -> dict[str, Any]:
        return {}


def test_a_kept_version_has_no_figures_of_other_weights() -> None:
    """Later weights were held back, and the run went back to those that are published."""
    nothing: Any = SimpleNamespace()
    gate = RegimeGate(Gate(0.05, 5), nothing, nothing)
    published = {1: version("s-regime-1@10", weights_sha256="w10", step=10)}

    def status(snapshot: Any) -> RegimePublication:
        [decision] = gate.decide(snapshot, published)
        return decision.status

    assert status(StubSnapshot(20, "w20")).step == 20
    assert status(StubSnapshot(10, "w10")) == RegimePublication(1, "s-regime-1@10")
