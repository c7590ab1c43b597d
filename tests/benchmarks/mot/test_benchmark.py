"""The command from its settings to JSON, tables and plot."""

from io import StringIO
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console

from benchmarks.mot.benchmark import both_fits, show
from benchmarks.mot.compare import MODELS, ComparisonSettings
from benchmarks.mot.figures import figures
from benchmarks.mot.training import Hyperparameters
from tests.benchmarks.mot.models import SHORT


def test_a_short_comparison_runs_to_the_end(tmp_path: Path) -> None:
    """Two seeds of everything give JSON, tables and a plot; the same seeds give the same numbers."""
    settings = ComparisonSettings(seeds=(0, 1), step_sizes=(30.0,), schedule=SHORT)
    result = figures(settings)
    assert orjson.loads(orjson.dumps(result))["setting"]["seeds"] == [0, 1]
    for found in result["noise"].values():
        assert set(found["models"]) == {model.name for model in MODELS}
        for routing in found["models"]["mot"]["routing"]:
            torch.testing.assert_close(torch.tensor(routing["matrix"]).sum(0), torch.ones(4))
            assert sum(routing["specialised"]) == Hyperparameters().num_experts
            assert 0.25 <= routing["purity"] <= 1
        assert found["models"]["mot_given"]["routing"][0]["purity"] == 1
    again = figures(settings)["noise"]["low"]["models"]["mot"]
    assert again == result["noise"]["low"]["models"]["mot"]
    console = Console(record=True, width=200, file=StringIO())
    show(result, console)
    assert "multi-head transformer" in console.export_text()
    pytest.importorskip("matplotlib")
    from benchmarks.mot.plot import draw  # noqa: PLC0415 - needs matplotlib

    draw(result, tmp_path / "mot.png")
    assert (tmp_path / "mot.png").read_bytes().startswith(b"\x89PNG")


def test_both_fits_have_their_signs() -> None:
    """A rising loss has a positive exponent."""
    found = {"exponential_rate": 0.009, "exponential_r2": 1.0, "power_exponent": -0.5, "power_r2": 0.25}
    assert both_fits(found) == "exp(-0.0090 t) 1.00, t^+0.50 0.25"
