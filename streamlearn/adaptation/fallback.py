"""What answers requests that no regime explains: the nearest regime, or the untouched backbone.

Neither is better on every backbone: a weak one gains from experts of a similar task, a strong one is disturbed by
them. So the daemon measures it on the hold-out records of each regime, as if that regime were not known:

    l_nearest = mean loss of the hold-out records of all regimes, each under the likeliest other regime      (1)
    l_backbone = mean loss of the same records without experts                                               (2)

The loss of a record is its mean over the learned tokens, in nats. The lower of (1) and (2) wins. While only one regime
is remembered there is no other, and the backbone answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.adapters.routing_context import NO_REGIME
from streamlearn.learner.evaluation import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.settings.service import Unknown
from streamlearn.shift.featurizer import input_of
from streamlearn.status.status import FallbackStatus
from streamlearn.stream.decode import Example

AssignToOther = Callable[[Sequence[NDArray[np.int32]], int], list[int]]
"""Slots of the likeliest regimes of inputs other than the one in the given slot."""


@dataclass(frozen=True)
class LossPair:
    """The losses of one regime's hold-out records, summed over the records."""

    other: float
    """Under the likeliest other regime."""
    backbone: float
    """Without experts."""
    records: int


class Fallback:
    """Measures one regime at a time. Measuring changes nothing that training depends on."""

    def __init__(
        self,
        learner: Learner,
        setting: Unknown,
        assign_to_other: AssignToOther,
        *,
        has_regimes: bool,
        pack_tokens: int,
    ) -> None:
        """`has_regimes`: whether routing depends on the regime; if not, the adapter answers unless set otherwise."""
        self._learner = learner
        self._setting = setting
        self._assign_to_other = assign_to_other
        self._has_regimes = has_regimes
        self._pack_tokens = pack_tokens
        self._pairs: dict[int, LossPair] = {}

    @property
    def is_measured(self) -> bool:
        """Whether the losses decide."""
        return self._setting == "auto" and self._has_regimes

    @property
    def uses_backbone(self) -> bool:
        """Whether the untouched backbone answers; if not, the nearest regime does."""
        if not self.is_measured:
            return self._setting == "backbone"
        pairs = self._pairs.values()
        return sum(pair.backbone for pair in pairs) <= sum(pair.other for pair in pairs)

    @property
    def status(self) -> FallbackStatus:
        """The decision, and eq. (1) and (2)."""
        pairs = self._pairs.values()
        records = sum(pair.records for pair in pairs)
        return FallbackStatus(
            setting=self._setting,
            answered_by="backbone" if self.uses_backbone else "nearest",
            nearest_loss=sum(pair.other for pair in pairs) / records if records else None,
            backbone_loss=sum(pair.backbone for pair in pairs) / records if records else None,
            records=records,
        )

    def measure(self, slot: int, examples: Sequence[Example]) -> None:
        """Compare both on the hold-out records of the regime in `slot`, under the present weights."""
        others = self._assign_to_other([input_of(example) for example in examples], slot)
        work = score(
            self._learner.model,
            [*examples, *examples],
            self._learner.device,
            pack_tokens=self._pack_tokens,
            slots=[*others, *[NO_REGIME] * len(examples)],
        )
        scores = run_to_end(work)
        self._pairs[slot] = LossPair(
            _sum_of_means(scores[: len(examples)]), _sum_of_means(scores[len(examples) :]), len(examples)
        )

    def forget(self, slot: int) -> None:
        """Drop a regime's losses: the slot has another regime, or its hold-out answers are outdated."""
        self._pairs.pop(slot, None)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {str(slot): asdict(pair) for slot, pair in self._pairs.items()}

    def load_json(self, rows: Mapping[str, Any]) -> None:
        """The inverse of `to_json`."""
        self._pairs = {int(slot): LossPair(**row) for slot, row in rows.items()}


def _sum_of_means(scores: Sequence[ExampleScore]) -> float:
    return sum(each.loss_sum / each.tokens for each in scores)
