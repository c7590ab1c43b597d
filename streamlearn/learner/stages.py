"""MoT's three training stages: which experts are trained in a step, and with what gradient.

    stage I, steps 1..T1        MLP experts only, each gradient divided by its Frobenius norm            (1)
    stage II, steps T1+1..T2    attention experts only, plain gradients                                  (2)
    stage III, from T2+1 on     MLP experts only, plain gradients                                        (3)

Mixture-of-Transformers, Algorithm 1 with eq. 8, 9 and 10; routers are trained in all stages. The paper takes a gradient
step along (1); here (1) is passed to AdamW, which rescales it, so the normalization affects the weighting between steps
and not the step size. Stages restart at every shift: a new regime is a new mixture to specialize on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings


class Stage(StrEnum):
    """One of the three stages."""

    FFN = "ffn"
    ATTENTION = "attention"
    FINE_TUNING = "fine_tuning"


@dataclass
class Stages:
    """The schedule of stages. `attention` names the banks of attention linears."""

    settings: LearnerSettings
    attention: frozenset[str]
    steps: int = 0
    """Updates since the last shift."""

    @property
    def stage(self) -> Stage:
        """Stage of the next update."""
        if self.steps < self.settings.ffn_steps:
            return Stage.FFN
        if self.steps < self.settings.ffn_steps + self.settings.attention_steps:
            return Stage.ATTENTION
        return Stage.FINE_TUNING

    def apply(self, groups: Sequence[Group], experts: frozenset[str]) -> None:
        """Apply the current stage to the gradients of one update and advance the schedule.

        Gradients of experts that the stage does not train are set to None; stage I replaces those of the others by
        normalized ones, in memory of their own: whoever has the tensors from before still reads the plain gradients.

        Args:
            groups: All groups of the optimizer.
            experts: Names of the groups that contain experts; the others are routers, trained in every stage.
        """
        stage = self.stage
        for group in groups:
            if group.name not in experts:
                continue
            frozen = (group.name in self.attention) != (stage is Stage.ATTENTION)
            for parameter in group.parameters.values():
                if frozen:
                    parameter.grad = None
                elif stage is Stage.FFN and parameter.grad is not None:
                    over = tuple(range(2, parameter.grad.ndim))
                    norm_HK = parameter.grad.norm(dim=over, keepdim=True)
                    parameter.grad = parameter.grad / norm_HK.clamp_min(1e-12)  # zero for an expert without tokens
        self.steps += 1

    def restart(self) -> None:
        """Start again with stage I: a shift."""
        self.steps = 0
