"""The three two-sample tests of a segment's window against the segment before it.

1. `MeanEmbeddingTest`: the distribution of the inputs changed.
2. `FitDropTest`: the tokens fit the regime worse. It separates short inputs, which the first test misses.
3. `TokenPresenceTest`: one token appeared or disappeared, which the other two miss.
"""

from dataclasses import dataclass
from typing import Self

from streamlearn.shift.alarm import Alarm
from streamlearn.shift.fit_drop_test import FitDropTest
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.reference_distribution import ReferenceDistribution
from streamlearn.shift.segment_window import SegmentWindow
from streamlearn.shift.token_presence_test import TokenPresenceTest


@dataclass(frozen=True)
class WindowTests:
    """The tests, in order; the first that exceeds its threshold raises the alarm."""

    level: float
    mean_embedding: MeanEmbeddingTest
    fit_drop: FitDropTest
    token_presence: TokenPresenceTest

    @classmethod
    def of(cls, level: float, windows: tuple[int, ...], *, serial_correlation: bool) -> Self:
        """Tests at one level; see `MeanEmbeddingTest` for the arguments."""
        mean_embedding = MeanEmbeddingTest(level, windows, serial_correlation)
        return cls(level, mean_embedding, FitDropTest(level, windows), TokenPresenceTest(level))

    def test(self, window: SegmentWindow, reference: ReferenceDistribution) -> Alarm | None:
        """Test the window; the alarm holds its records from the change point on."""
        if rejection := self.mean_embedding.test(window.phi_ND, reference):
            start = self.mean_embedding.change_point(window.phi_ND, reference)
        elif rejection := self.fit_drop.test(window.fits, window.fits_before):
            start = self.fit_drop.change_point(window.fits, window.fits_before)
        elif change := self.token_presence.test(window.token_records_B, len(window.records), window.tokens_before):
            start = self.token_presence.change_point([each.features.buckets for each in window.records], change)
            return Alarm(change.statistic, change.threshold, window.records[start:], change)
        else:
            return None
        return Alarm(rejection.statistic, rejection.threshold, window.records[start:])
