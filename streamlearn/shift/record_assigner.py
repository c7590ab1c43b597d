"""Assignment of a single record: the segment's regime, or another known one to which it clearly belongs."""

from dataclasses import dataclass

from streamlearn.shift.featurizer import Features
from streamlearn.shift.regime_memory import RegimeMemory, RegimeScores
from streamlearn.shift.regime_profile import MATURE

MARGIN = 8.0
"""Nats by which another regime must explain a record better than its own to take it."""
MIN_FIT = -2.5
"""Deviations of the lower tail of a regime's fit below which a single record does not belong to it."""
PARENT_MARGIN = 0.25
"""Nats per bucket, in addition to `MARGIN`, by which a young regime's parent must explain a record better."""


@dataclass(frozen=True)
class RecordAssigner:
    """The rule; it holds no state."""

    regimes: RegimeMemory

    def assign(self, record: Features, scores: RegimeScores, here: int, parent: int) -> int:
        """Slot of the record's regime, given the slots of the segment's regime and of the one it was split from."""
        best = int(scores.scores_R.argmax())
        profile = self.regimes[best]
        own_records = self.regimes[here].records
        margin = MARGIN * min(own_records / MATURE, 1.0)  # a young regime has no claim to ambiguous records
        if best == parent and own_records < 2 * MATURE:
            margin = MARGIN + PARENT_MARGIN * len(record.buckets)
        is_clear = scores.scores_R[best] - scores.scores_R[here] > margin and profile.is_mature
        fits = is_clear and profile.tail_fit(float(scores.log_ratios_R[best]), record) > MIN_FIT
        return best if fits else here
