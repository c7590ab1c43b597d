"""Ratios of the speed benchmark."""

import pytest

from streamlearn.bench.speed import ratios


def test_ratios_are_quotients_of_the_arms() -> None:
    """Numerator and denominator are those of the name."""
    speeds = {"frozen_floor": 10.0, "lora": 8.0, "loramoe": 7.0, "mh_moe": 6.0, "streamlearn": 3.0, "mh_moe_loop": 2.0}
    assert ratios(speeds) == pytest.approx(
        {
            "mh_moe_over_lora": 0.75,
            "mh_moe_over_loop": 3.0,
            "streamlearn_over_mh_moe": 0.5,
            "mh_moe_over_floor": 0.6,
            "lora_over_floor": 0.8,
        }
    )
