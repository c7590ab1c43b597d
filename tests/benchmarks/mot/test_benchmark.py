"""The comparison from its settings to JSON and plot."""

from pathlib import Path

import orjson
import pytest
import torch

from benchmarks.mot.compare import MODELS, ComparisonSettings, draw, figures
from benchmarks.mot.models import Hyperparameters
from tests.benchmarks.mot.models import SHORT


def test_a_short_comparison_runs_to_the_end(tmp_path: Path) -> None:
    """Two seeds of everything give JSON and a plot; the same seeds give the same numbers."""
    settings = ComparisonSettings(seeds=(0, 1), step_sizes=(30.0,), schedule=SHORT)
    result = figures(settings)
    assert orjson.loads(orjson.dumps(result))["setting"]["seeds"] == [0, 1]
    for found in result["noise"].values():
        assert set(found["models"]) == {model.name for model in MODELS}
        for routing in found["models"]["mot"]["routing"]:
            torch.testing.assert_close(torch.tensor(routing["matrix"]).sum(0), torch.ones(4))
            assert sum(routing["specialized"]) == Hyperparameters().num_experts
            assert 0.25 <= routing["purity"] <= 1
        assert found["models"]["mot_given"]["routing"][0]["purity"] == 1
    again = figures(settings)["noise"]["low"]["models"]["mot"]
    assert again == result["noise"]["low"]["models"]["mot"]
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "mot.png")
    assert (tmp_path / "mot.png").read_bytes().startswith(b"\x89PNG")
