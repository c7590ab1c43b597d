"""The speed benchmark compares like with like."""

import pytest

from streamlearn.adapters import activated_parameters, resolve
from streamlearn.bench.speed import lora_as_large_as, ratios
from streamlearn.settings import AdapterSettings

SHAPES = {"mlp.gate_proj": (256, 640), "mlp.up_proj": (256, 640), "mlp.down_proj": (640, 256)}


def test_lora_gets_as_many_activated_parameters() -> None:
    """Within a rank's worth of those of mh-moe, so that neither arm is made weak."""
    mh_moe = resolve(AdapterSettings(preset="mh-moe"))
    lora = lora_as_large_as(mh_moe, SHAPES)
    wanted, found = activated_parameters(mh_moe, SHAPES), activated_parameters(lora, SHAPES)
    assert abs(wanted - found) <= activated_parameters(resolve(AdapterSettings(preset="lora", rank=1)), SHAPES) / 2


def test_ratios_are_quotients_of_the_arms() -> None:
    """Numerator and denominator as the names say."""
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
