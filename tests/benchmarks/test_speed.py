"""Ratios of the speed benchmark."""

import pytest

from benchmarks.speed import RATIOS, ratios, table
from benchmarks.speed_arms import ARMS, FOLDER_ARMS, SpeedArm


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


def test_a_backbone_may_lack_an_arm() -> None:
    """Its ratios are left out, and the table says so."""
    arms = {
        name: {arm: SpeedArm(arm, lambda _: None, 0, speeds=[100.0, 50.0]) for arm in names}
        for name, names in (("nano", ARMS), ("folder", FOLDER_ARMS))
    }
    found = {name: ratios(each) for name, each in arms.items()}
    assert found["nano"].keys() - found["folder"].keys() == {"mh_moe_over_mh_moe_loop"}
    result = {
        "arms": {name: {arm: each.figures() for arm, each in built.items()} for name, built in arms.items()},
        "ratios": found,
        "daemon_over_bare": 0.9,
        "images": {"image_path_over_ready": 0.8},
    }
    folder = list(table(result, tuple(arms)).columns[2].cells)
    assert folder.count("-") == 4  # three figures of the arm, one ratio
