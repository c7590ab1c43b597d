"""The newest records of the current segment's regime, and statistics of the segment before them.

A record that leaves the window is settled: it enters the regime's reference distribution for good, and the statistics
with which the tests compare the window.
"""
# Shape suffixes: B buckets, D features, N records of the window.

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from streamlearn.shift.document_frequency import DocumentFrequency, add_record, count_records, remove_record
from streamlearn.shift.fit_drop_test import RunningStats
from streamlearn.shift.mean_embedding_test import WINDOWS
from streamlearn.shift.recent_record import RecentRecord, stack_phi
from streamlearn.shift.regime_memory import RegimeMemory
from streamlearn.shift.regime_profile import MATURE

SIZE = max(WINDOWS)
"""Records in the window. A segment may begin with more; the window does not grow then."""


@dataclass(frozen=True, eq=False)
class WindowState:
    """What a snapshot keeps of a window; the rest is computed from it."""

    records: tuple[RecentRecord, ...] = ()
    fits_before: RunningStats = field(default_factory=RunningStats)
    """Over the fits of the segment's records before the window."""
    tokens_before: DocumentFrequency = field(default_factory=DocumentFrequency)
    """Over the segment's records before the window."""


class SegmentWindow:
    """The window, with what the tests need of its records: phi, fits and token frequencies."""

    def __init__(self, state: WindowState) -> None:
        self.records = state.records
        self.fits_before = state.fits_before
        self.tokens_before = state.tokens_before
        self.phi_ND = stack_phi(self.records)
        self.fits = [each.fit for each in self.records]
        self.token_records_B = count_records(each.features.buckets for each in self.records)
        """Number of records with each token."""

    @property
    def state(self) -> WindowState:
        """A cheap copy: nothing in it is written to later."""
        return WindowState(self.records, self.fits_before, self.tokens_before)

    def append(self, record: RecentRecord, regimes: RegimeMemory) -> None:
        """Add the newest record; settle the oldest when the window is full."""
        self.records = (*self.records, record)
        self.fits.append(record.fit)
        self.phi_ND = np.concatenate([self.phi_ND, record.features.phi_D[None]])
        add_record(self.token_records_B, record.features.buckets)
        if len(self.records) > SIZE:
            self._settle_oldest(regimes)

    def close(self, moved: Collection[RecentRecord], regimes: RegimeMemory) -> None:
        """Settle the records at the end of the segment, except those moved to the next one."""
        staying = [each for each in self.records if each not in moved]
        phi_ND = stack_phi(staying)
        for i, each in enumerate(staying):
            regimes.settle(each.slot, each.features, each.ordinal, phi_ND[i + 1 :])

    def _settle_oldest(self, regimes: RegimeMemory) -> None:
        oldest, self.records = self.records[0], self.records[1:]
        fit, self.phi_ND = self.fits.pop(0), self.phi_ND[1:]
        remove_record(self.token_records_B, oldest.features.buckets)
        self.tokens_before = self.tokens_before.after(oldest.features.buckets)
        regimes.settle(oldest.slot, oldest.features, oldest.ordinal, self.phi_ND)
        if regimes[oldest.slot].records >= 2 * MATURE:  # the fit of a young regime's records still rises
            self.fits_before = self.fits_before.after(fit)
