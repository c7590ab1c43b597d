"""Skill between the blind answer and the ceiling."""

import re

import pytest

from benchmarks.learn.skill import skill_scale


def test_skill_is_zero_at_blind_and_one_at_the_best_ceiling() -> None:
    """The ceiling is the best of one LoRA per task and joint training, not the best method."""
    scale = skill_scale({"blind": 0.2, "joint": 0.5, "joint-3": 0.6, "lora-per-task": 0.4, "streamlearn": 0.9})
    assert (scale.ceiling, scale.undefined) == ("joint-3", None)
    assert [scale.skill(AP) for AP in (0.2, 0.4, 0.6)] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("mean_AP", "reason"),
    [
        ({"joint": 0.5}, "there is no run of blind"),
        ({"blind": 0.2, "lora": 0.5}, r"there is no run of a ceiling \(lora-per-task, joint, joint-3\)"),
        (
            {"blind": 0.5, "joint": 0.5},
            "AP of the ceiling, joint, is 0.500, which does not exceed that of blind, 0.500",
        ),
    ],
)
def test_skill_is_undefined_without_two_ends(mean_AP: dict[str, float], reason: str) -> None:
    """The reason is given."""
    scale = skill_scale(mean_AP)
    assert scale.skill(0.4) is None
    assert scale.undefined is not None
    assert re.fullmatch(reason, scale.undefined)
