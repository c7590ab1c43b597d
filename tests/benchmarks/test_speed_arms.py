"""The arms of the speed benchmark are comparable."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed_arms import ARMS, build_arm, lora_as_large_as
from streamlearn.adapters import activated_parameters, resolve
from streamlearn.backbone.load import load, outline
from streamlearn.settings import AdapterSettings, BackboneSettings
from streamlearn.stream.record import Batch
from tests.doubles import random_examples

SHAPES = {"mlp.gate_proj": (256, 640), "mlp.up_proj": (256, 640), "mlp.down_proj": (640, 256)}


def test_lora_gets_as_many_activated_parameters() -> None:
    """The difference from mh-moe is at most half a rank, so that neither arm is at a disadvantage."""
    mh_moe = resolve(AdapterSettings(preset="mh-moe"))
    lora = lora_as_large_as(mh_moe, SHAPES)
    target, found = activated_parameters(mh_moe, SHAPES), activated_parameters(lora, SHAPES)
    assert abs(target - found) <= activated_parameters(resolve(AdapterSettings(preset="lora", rank=1)), SHAPES) / 2


@pytest.mark.parametrize("name", ARMS)
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
