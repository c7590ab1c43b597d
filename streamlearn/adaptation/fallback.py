"""What answers requests that no regime explains: a mean of the regimes' adapters, the nearest one, or the backbone.

None is best on every backbone and stream. A weak backbone gains from the experts of a similar task, a strong one is
disturbed by them. What many tasks have in common, such as the form of an answer, remains when their adapters are
averaged. So the daemon measures it on the hold-out records of each regime, as if that regime were not known:

    l_a = mean loss of the hold-out records of all regimes, each answered by a without its own regime       (1)

The loss of a record is its mean over the learned tokens, in nats. The lowest wins. While only one regime is remembered
there is no other, and the backbone answers. Where regimes share their experts there are no adapters to average.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from streamlearn.adapters.routing_context import NO_REGIME, Slot
from streamlearn.learner.evaluation import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.settings.service import Unknown
from streamlearn.shift.featurizer import input_of
from streamlearn.status.status import FallbackStatus
from streamlearn.stream.decode import Example

MAX_AVERAGED = 16
"""Adapters in the mean: those of the regimes with the most records. Each takes time in every forward pass."""
Alternative = Literal["backbone", "mean", "nearest"]


class Regimes(Protocol):
    """The regimes that are remembered."""

    def assign_to_other(self, inputs: Sequence[NDArray[np.int32]], slot: int) -> list[int]:
        """The likeliest regime of each input other than the one in `slot`."""

    def by_records(self) -> list[int]:
        """Slots of all regimes, the one with the most records first."""


@dataclass(frozen=True)
class RegimeLosses:
    """The losses of one regime's hold-out records, summed over the records."""

    losses: dict[Alternative, float]
    records: int


class Fallback:
    """Measures one regime at a time. Measuring changes nothing that training depends on."""

    def __init__(
        self,
        learner: Learner,
        setting: Unknown,
        regimes: Regimes,
        *,
        has_regimes: bool,
        pack_tokens: int,
    ) -> None:
        """`has_regimes`: whether routing depends on the regime; if not, the adapter answers unless set otherwise."""
        self._learner = learner
        self._setting = setting
        self._regimes = regimes
        self._has_regimes = has_regimes
        self._pack_tokens = pack_tokens
        self._alternatives: tuple[Alternative, ...] = (
            ("backbone", "mean", "nearest") if learner.per_regime else ("backbone", "nearest")
        )
        self._measured: dict[int, RegimeLosses] = {}

    @property
    def is_measured(self) -> bool:
        """Whether the losses decide."""
        return self._setting == "auto" and self._has_regimes

    @property
    def answered_by(self) -> Alternative:
        """What answers. Where all regimes share the adapter and its routing, `nearest` is the adapter."""
        if self._setting != "auto":
            return self._setting
        if not self._has_regimes:
            return "nearest"
        means = self._mean_losses()
        return min(self._alternatives, key=means.__getitem__) if means else "backbone"

    @property
    def status(self) -> FallbackStatus:
        """The decision, and eq. (1)."""
        means = self._mean_losses()
        return FallbackStatus(
            setting=self._setting,
            answered_by=self.answered_by,
            mean_loss=means.get("mean"),
            nearest_loss=means.get("nearest"),
            backbone_loss=means.get("backbone"),
            records=sum(each.records for each in self._measured.values()),
        )

    def slot_for(self, nearest: int) -> Slot:
        """What adapts an input that no regime explains, and which the regime in the slot `nearest` explains best."""
        return self._slot(self.answered_by, nearest)

    def measure(self, slot: int, examples: Sequence[Example]) -> None:
        """Compare the alternatives on the hold-out records of the regime in `slot`, under the present weights."""
        others = self._regimes.assign_to_other([input_of(example) for example in examples], slot)
        losses: dict[Alternative, float] = {}
        for alternative in self._alternatives:
            slots = [self._slot(alternative, each, without=slot) for each in others]
            work = score(
                self._learner.model, examples, self._learner.device, pack_tokens=self._pack_tokens, slots=slots
            )
            losses[alternative] = _sum_of_means(run_to_end(work))
        self._measured[slot] = RegimeLosses(losses, len(examples))

    def forget(self, slot: int) -> None:
        """Drop a regime's losses: the slot has another regime, or its hold-out answers are outdated."""
        self._measured.pop(slot, None)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {str(slot): asdict(each) for slot, each in self._measured.items()}

    def load_json(self, rows: Mapping[str, Any]) -> None:
        """The inverse of `to_json`. Rows of older snapshots lack an alternative; their regimes are measured again."""
        self._measured = {
            int(slot): RegimeLosses(**row)
            for slot, row in rows.items()
            if row.get("losses", {}).keys() == set(self._alternatives)
        }

    def _mean_losses(self) -> dict[Alternative, float]:
        """Eq. (1) of each alternative; empty before a measurement."""
        measured = self._measured.values()
        records = sum(each.records for each in measured)
        return {a: sum(each.losses[a] for each in measured) / records for a in self._alternatives if records}

    def _slot(self, alternative: Alternative, nearest: int, *, without: int | None = None) -> Slot:
        """What adapts an input under an alternative, as if the regime in the slot `without` were not known."""
        if alternative == "backbone":
            return NO_REGIME
        if alternative == "nearest":
            return nearest
        return tuple([slot for slot in self._regimes.by_records() if slot != without][:MAX_AVERAGED])


def _sum_of_means(scores: Sequence[ExampleScore]) -> float:
    return sum(each.loss_sum / each.tokens for each in scores)
