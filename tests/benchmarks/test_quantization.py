"""Quantization: differences between runs of one seed, and a run in its own process."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import quantization
from benchmarks.measuring import MeasurementError, in_own_process
from benchmarks.quantization import KINDS, draw, summary, table
from streamlearn.backbone.load import load, outline
from streamlearn.settings import BackboneSettings


def run(kind: str, seed: int, loss: float) -> dict[str, Any]:
    memory = {"backbone_mib": 10.0, "peak_mib": 900.0, "step_s": 1.0}
    losses = {"prequential_loss": loss, "scored_before": loss + 1, "scored_after": loss - 1}
    return {"kind": kind, "seed": seed, **losses, **memory, "losses": [loss + 1, loss]}


STORED_BYTES = {"bfloat16": (1, 2), "float32": (1, 4)}
"""Bytes of a weight by dtype: of the quantized linears, and of what is not quantized."""

RUNS = [run("none", 0, 3.0), run("none", 1, 3.5), run("int8", 0, 3.1), run("int8", 1, 3.7), run("nf4", 0, 4.0)]


def test_differences_are_between_runs_of_one_seed() -> None:
    """The seeds of the unquantized backbone show how far runs differ anyway."""
    found = summary("int8", RUNS)
    assert found["prequential_loss"] == pytest.approx(3.4)
    assert found["prequential_loss_over_none"] == pytest.approx(0.15)
    assert summary("none", RUNS)["scored_after_range"] == pytest.approx(0.5)
    assert summary("none", RUNS)["scored_after_over_none"] == 0


def test_the_result_is_shown_and_drawn(tmp_path: Path) -> None:
    """One column for each way to store the weights."""
    summaries: dict[str, dict[str, float]] = {kind: summary(kind, RUNS) for kind in KINDS}
    assert [column.header for column in table(summaries).columns] == ["", *KINDS]
    setting = {"backbone": "nano", "records": 16, "seeds": 2}
    draw({"summary": summaries, "runs": RUNS, "setting": setting}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.long
def test_a_run_learns_and_scores() -> None:
    """A process of its own returns what this one computes."""
    options = {"kind": "int8", "seed": 0, "records": 16, "backbone": None}
    found = in_own_process("benchmarks.quantization", options)
    here = quantization.run(**options)  # type: ignore[arg-type]
    assert len(found["losses"]) == 16 // quantization.BATCH_RECORDS
    assert found["losses"] == here["losses"]
    assert found["scored_after"] < found["scored_before"]
    whole = sum(part.numel() for part in load(BackboneSettings(), outline(BackboneSettings())).model.parameters())
    linears, others = STORED_BYTES[found["dtype"]]
    assert linears < found["backbone_mib"] * 2**20 / whole < others, "between that of the linears and of the others"


@pytest.mark.long
def test_a_failed_process_is_an_error_with_its_last_lines() -> None:
    """The error names the options."""
    with pytest.raises(MeasurementError, match=r"'kind': 'int2'(.|\n)*exit code 1(.|\n)*int2"):
        in_own_process("benchmarks.quantization", {"kind": "int2", "seed": 0, "records": 8, "backbone": None})
