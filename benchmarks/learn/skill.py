"""Skill: where a method stands between the best answer that ignores the input and the best ceiling.

The ceiling is the best mean AP among methods that do not have to learn continually: one LoRA per task, with each test
record's task given, and a LoRA on all records in random order, in one pass and in three.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.learn.run_files import BLIND
from benchmarks.learn.scores import skill

CEILINGS = ("lora-per-task", "joint", "joint-3")
CONTROL = "lora-per-regime"


@dataclass(frozen=True)
class SkillScale:
    """The two ends of skill, `scores` eq. (7), or the reason why there is no scale."""

    ceiling: str | None
    """The method with the best mean AP among `CEILINGS`; None without a run of one of them."""
    blind_AP: float | None
    ceiling_AP: float | None

    @property
    def undefined(self) -> str | None:
        """The reason why skill is undefined; None where it is defined."""
        if self.blind_AP is None:
            return f"there is no run of {BLIND}"
        if self.ceiling_AP is None:
            return f"there is no run of a ceiling ({', '.join(CEILINGS)})"
        if self.ceiling_AP <= self.blind_AP:
            return (
                f"AP of the ceiling, {self.ceiling}, is {self.ceiling_AP:.3f}, which does not exceed that of {BLIND}, "
                f"{self.blind_AP:.3f}"
            )
        return None

    def skill(self, AP: float) -> float | None:
        """Return the skill of an AP; None where it is undefined."""
        if self.blind_AP is None or self.ceiling_AP is None:
            return None
        return skill(AP, self.blind_AP, self.ceiling_AP)


def skill_scale(mean_AP: Mapping[str, float]) -> SkillScale:
    """Find the two ends of the scale among the mean AP of the methods."""
    ceiling = max((name for name in CEILINGS if name in mean_AP), key=mean_AP.__getitem__, default=None)
    return SkillScale(ceiling, mean_AP.get(BLIND), None if ceiling is None else mean_AP[ceiling])
