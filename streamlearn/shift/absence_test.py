"""Absence of the segment's regime: a CUSUM over which records are its own.

    c <- max(0, c + log((1 - q) / (1 - p)))  for a record of the segment's regime                           (1)
    c <- c + log(q / p)                      for a record of another regime                                 (2)

Page 1954. p is the recent share of other regimes' records, an exponential moving average; q = 0.97 is the share that is
expected once the regime is gone. Alarm when c exceeds -log(level). Interleaved known regimes raise p and no alarm.

    >>> test = AbsenceTest(level=1e-6)
    >>> for ordinal in range(1, 201):
    ...     test.update(ordinal, own=ordinal % 2 == 0 and ordinal < 150)    # planted: from record 150 on
    ...     if test.drift_detected:
    ...         print(ordinal, test.state.run_start)
    ...         break
    193 149
"""

import math
from dataclasses import dataclass, field, replace

ABSENT_SHARE = 0.97
"""The q of eq. (1) and (2)."""
EMA_RECORDS = 32
"""Time constant of p, in records."""
MIN_SHARE, MAX_SHARE = 0.03, 0.95
"""Bounds of p, so that no single record decides."""


@dataclass(frozen=True)
class AbsenceState:
    """What a snapshot keeps of the test."""

    share: float = 0.0
    """The p before its bounds are applied."""
    statistic: float = 0.0
    """The c of eq. (1) and (2)."""
    run_start: int = 0
    """Ordinal of the record at which the statistic last left 0."""


@dataclass
class AbsenceTest:
    """The test."""

    level: float
    """Probability of an alarm under no change."""
    state: AbsenceState = field(default_factory=AbsenceState)

    @property
    def threshold(self) -> float:
        """Lower bound of an alarm's statistic."""
        return -math.log(self.level)

    @property
    def drift_detected(self) -> bool:
        """Whether the statistic exceeds the threshold."""
        return self.state.statistic > self.threshold

    def update(self, ordinal: int, *, own: bool) -> None:
        """Process the next record, of the segment's regime (`own`) or of another."""
        share, statistic, run_start = self.state.share, self.state.statistic, self.state.run_start
        p = min(max(share, MIN_SHARE), MAX_SHARE)
        if own:
            statistic = max(0.0, statistic + math.log((1 - ABSENT_SHARE) / (1 - p)))
            share *= 1 - 1 / EMA_RECORDS
        else:
            run_start = ordinal if statistic == 0.0 else run_start
            statistic += math.log(ABSENT_SHARE / p)
            share += (1 - share) / EMA_RECORDS
        self.state = AbsenceState(share, statistic, run_start)

    def restart(self, ordinals: list[int], now: int) -> None:
        """Start a new segment, given the ordinals of its records and of the newest record."""
        recent = sum(ordinal > now - EMA_RECORDS for ordinal in ordinals)
        self.state = replace(self.state, share=1 - min(recent / EMA_RECORDS, 1.0), statistic=0.0)
