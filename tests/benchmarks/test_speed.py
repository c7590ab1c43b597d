"""The arms of the speed benchmark are comparable, and its ratios are those of a round."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed import RATIOS, ratios
from benchmarks.speed_arms import ARMS, SpeedArm, build_arm, lora_as_large_as
from streamlearn.adapters.presets import activated_parameters, resolve
from streamlearn.backbone.load import load, outline
from streamlearn.settings import AdapterSettings, BackboneSettings
from streamlearn.stream.record import Batch
from tests.doubles import random_examples

SHAPES = {"mlp.gate_proj": (256, 640), "mlp.up_proj": (256, 640), "mlp.down_proj": (640, 256)}


def test_ratios_are_medians_of_quotients_within_a_round() -> None:
    """Not quotients of medians: the second round is ten times slower for both, and changes nothing."""
    arms = {name: SpeedArm(name, lambda _: None, 0, speeds=[100.0, 10.0, 100.0]) for name in ARMS}
    arms["streamlearn"].speeds = [90.0, 9.0, 80.0]
    arms["frozen_floor"].speeds = [400.0, 20.0, 200.0]
    found = ratios(arms)
    assert len(found) == len(RATIOS)
    assert found["streamlearn_over_lora"] == pytest.approx(0.9)
    assert found["lora_over_frozen_floor"] == pytest.approx(0.5)
    assert found["mh_moe_over_lora"] == pytest.approx(1.0)


def test_lora_gets_as_many_activated_parameters() -> None:
    """The difference from mh-moe is at most half a rank, so that neither arm is at a disadvantage."""
    mh_moe = resolve(AdapterSettings(preset="mh-moe"))
    lora = lora_as_large_as(mh_moe, SHAPES)
    target, found = activated_parameters(mh_moe, SHAPES), activated_parameters(lora, SHAPES)
    assert abs(target - found) <= activated_parameters(resolve(AdapterSettings(preset="lora", rank=1)), SHAPES) / 2


@pytest.mark.parametrize("name", [name for name in ARMS if name != "streamlearn_300"])
def test_every_arm_takes_a_step(tiny: Path, tmp_path: Path, name: str) -> None:
    """The frozen floor computes gradients only; every other arm trains."""

    def make() -> Any:
        settings = BackboneSettings(model=str(tiny), dtype="float32", device="cpu")
        return load(settings, outline(settings)).model

    torch.manual_seed(0)
    built = build_arm(name, make, tmp_path)
    step = built.step(Batch((), random_examples((6, 5))))
    assert (step is None) == (name == "frozen_floor")
    assert (built.parameters == 0) == (name == "frozen_floor")
