"""When the regimes are scored: on their hold-out records, and on canaries.

Scoring is done between steps, in a share of the training time or while no record waits. It changes nothing that
training depends on.
"""

from collections.abc import Iterable, Mapping, Sequence

from streamlearn.events import Event, get_logger
from streamlearn.learner.learner import Learner
from streamlearn.regimes.canaries import Canary, CanaryScores
from streamlearn.regimes.holdout import Forgetting, TimeBudget
from streamlearn.regimes.regime import Regime
from streamlearn.settings import Settings

_log = get_logger("shift")


class Scorer:
    """Scores regimes when they are due."""

    def __init__(self, learner: Learner, settings: Settings, canaries: Sequence[Canary]) -> None:
        pack_tokens = settings.stream.batch_tokens
        self.forgetting = Forgetting(learner, pack_tokens=pack_tokens)
        self.canary_scores = CanaryScores(learner, canaries, pack_tokens=pack_tokens)
        self.budget = TimeBudget(settings.holdout.time_share / 2)
        """The other half is for `BackboneComparison`."""
        self.saved_at = -1
        """Step of the newest snapshot."""
        self._learner = learner

    def score_stalest(self, by_slot: Mapping[int, Regime], *, idle: bool) -> bool:
        """Score the hold-out records or canaries of one regime when the time budget allows; return whether it did.

        First the hold-out records of one whose segment ended, then the canaries of one that the newest snapshot has
        changed, then the hold-out records of the one scored longest ago; nothing while all scores hold.
        """
        if not (idle or self.budget.affordable):
            return False
        regimes = [regime for _, regime in sorted(by_slot.items()) if regime.holdouts.records]
        stale = [regime for regime in regimes if not self.forgetting.holds(regime.scores)]
        regime = min(stale, key=lambda regime: (not regime.scores.ended, regime.scores.tried_at), default=None)
        unwatched = None if regime is not None and regime.scores.ended else self._next_for_canaries(by_slot.values())
        if regime is None and unwatched is None:
            return False
        with self.budget.spending(idle=idle):
            if unwatched is not None:
                self._score_canaries(unwatched)
            elif regime is not None:
                self._score(regime, at_end=regime.scores.ended, idle=idle)
        return True

    def score_at_end(self, regime: Regime) -> None:
        """Score a regime whose segment ended, also where no time is left for it."""
        with self.budget.spending():
            self._score(regime, at_end=True)

    def _next_for_canaries(self, regimes: Iterable[Regime]) -> Regime | None:
        """The regime scored longest ago on the canaries of those that the newest snapshot has changed."""
        if not self.canary_scores.canaries:
            return None
        changed = [regime for regime in regimes if regime.canaries_at < self._changed_by_snapshot(regime)]
        return min(changed, key=lambda regime: (regime.canaries_at, regime.number), default=None)

    def _changed_by_snapshot(self, regime: Regime) -> int:
        """Step of the newest snapshot, or of the regime's last update if that was earlier."""
        return min(self.saved_at, regime.scores.trained_at) if self._learner.per_regime else self.saved_at

    def _score_canaries(self, regime: Regime) -> None:
        regime.canaries, regime.canaries_at = self.canary_scores.measure(regime.slot), self._learner.number
        regime.status = None
        _log.debug(
            Event.CANARIES_SCORED,
            regime=regime.number,
            step=regime.canaries_at,
            harm={row.slice: round(row.loss - row.backbone_loss, 4) for row in regime.canaries},
        )

    def _score(self, regime: Regime, *, at_end: bool = False, idle: bool = False) -> None:
        examples = regime.holdouts.examples
        scoring = self.forgetting.measure(regime.scores, regime.slot, examples, at_end=at_end)
        regime.status = None
        if scoring is None:
            _log.warning(Event.HOLDOUT_NOT_FINITE, regime=regime.number, records=len(examples))
            return
        _log.debug(
            Event.HOLDOUT_SCORED,
            regime=regime.number,
            step=scoring.step,
            loss=round(scoring.loss, 4),
            accuracy=round(scoring.accuracy, 4),
            records=len(examples),
            at_end=at_end,
            idle=idle,
        )
