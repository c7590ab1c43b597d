"""When the regimes are scored: on their hold-out records, and on canaries.

Scoring is done between steps, in a share of the training time or while no record waits. It changes nothing that
training depends on.
"""

from collections.abc import Mapping, Sequence

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
        self._canaries_next = True

    def score_stalest(self, by_slot: Mapping[int, Regime], *, idle: bool) -> bool:
        """Score the hold-out records or canaries of one regime when the time budget allows; return whether it did.

        First the hold-out records of one whose segment ended. Then in turns the canaries of one that changed up to the
        newest snapshot, in as many calls as it has forward passes, and the hold-out records of the one scored longest
        ago; nothing while all scores hold.
        """
        if not (idle or self.budget.affordable):
            return False
        regimes = [regime for _, regime in sorted(by_slot.items()) if regime.holdouts.records]
        stale = [regime for regime in regimes if not self.forgetting.holds(regime.scores)]
        regime = min(stale, key=lambda regime: (not regime.scores.ended, regime.scores.tried_at), default=None)
        is_urgent = regime is not None and regime.scores.ended
        with self.budget.spending(idle=idle):
            if not is_urgent and (regime is None or self.canary_scores.is_running or self._canaries_next):
                self._canaries_next = False
                if self.canary_scores.advance():
                    return True
            if regime is None:
                return False
            self._score(regime, at_end=regime.scores.ended, idle=idle)
            self._canaries_next = True
        return True

    def score_at_end(self, regime: Regime) -> None:
        """Score a regime whose segment ended, also where no time is left for it."""
        with self.budget.spending():
            self._score(regime, at_end=True)

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
