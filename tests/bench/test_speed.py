"""Ratios of the speed benchmark."""

import pytest

from streamlearn.bench.speed import RATIOS, ratios
from streamlearn.bench.speed_arms import ARMS, SpeedArm


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
