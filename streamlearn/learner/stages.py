"""MoT's three stages: which experts a step may train, and with what gradient.

    stage I, steps 1..T1        MLP experts alone, each with its gradient over its Frobenius norm        (1)
    stage II, steps T1+1..T2    attention experts alone, plain gradients                                 (2)
    stage III, from T2+1 on     MLP experts alone, plain gradients                                       (3)

Mixture-of-Transformers, Algorithm 1 with eq. 8, 9 and 10; routers are trained throughout. The paper descends along (1)
itself; here it goes through AdamW, whose own scaling makes the normalisation matter between steps, not within one. The
clock starts anew at every shift: a new regime is a new mixture to specialise on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from streamlearn.learner.optimizer import Group
from streamlearn.settings import LearnerSettings


class Stage(StrEnum):
    """Where the clock stands."""

    FFN = "ffn"
    ATTENTION = "attention"
    FINE_TUNING = "fine_tuning"


@dataclass
class Stages:
    """The clock, and what it lets move. `attention` names the banks that are attention's."""

    settings: LearnerSettings
    attention: frozenset[str]
    steps: int = 0
    """Updates since the last shift."""

    @property
    def stage(self) -> Stage:
        """Of the next update."""
        if self.steps < self.settings.ffn_steps:
            return Stage.FFN
        if self.steps < self.settings.ffn_steps + self.settings.attention_steps:
            return Stage.ATTENTION
        return Stage.FINE_TUNING

    def apply(self, groups: Sequence[Group], experts: frozenset[str]) -> None:
        """Drop the gradients of experts that this stage leaves alone, normalise the others' in stage I; tick.

        `experts` names the groups that hold experts; all others are routers, which every stage trains.
        """
        stage = self.stage
        for group in groups:
            if group.name not in experts:
                continue
            resting = (group.name in self.attention) != (stage is Stage.ATTENTION)
            for parameter in group.parameters.values():
                if resting:
                    parameter.grad = None
                elif stage is Stage.FFN and parameter.grad is not None:
                    over = tuple(range(2, parameter.grad.ndim))
                    norm_HK = parameter.grad.norm(dim=over, keepdim=True)
                    parameter.grad.div_(norm_HK.clamp_min(1e-12))  # an expert without tokens has gradient zero
        self.steps += 1

    def restart(self) -> None:
        """A shift."""
        self.steps = 0
