"""Quantization: differences between runs of one seed, and a run in its own process."""

from typing import Any

import pytest

from benchmarks.quantization import summary


def run(kind: str, seed: int, loss: float) -> dict[str, Any]:
    memory = {"backbone_mib": 10.0, "peak_mib": 900.0, "step_s": 1.0}
    losses = {"prequential_loss": loss, "scored_before": loss + 1, "scored_after": loss - 1}
    return {"kind": kind, "seed": seed, **losses, **memory, "losses": [loss + 1, loss]}


RUNS = [run("none", 0, 3.0), run("none", 1, 3.5), run("int8", 0, 3.1), run("int8", 1, 3.7), run("nf4", 0, 4.0)]


def test_differences_are_between_runs_of_one_seed() -> None:
    """The seeds of the unquantized backbone show how far runs differ anyway."""
    found = summary("int8", RUNS)
    assert found["prequential_loss"] == pytest.approx(3.4)
    assert found["prequential_loss_over_none"] == pytest.approx(0.15)
    assert summary("none", RUNS)["scored_after_range"] == pytest.approx(0.5)
    assert summary("none", RUNS)["scored_after_over_none"] == 0
