"""The memory of regimes: at most `max_regimes` profiles, each in a slot.

When a new regime needs a slot and none is free, two regimes that the change test cannot tell apart are merged. Where
all pairs differ, the regime of least worth is dropped:

    worth = records / (1 + records seen since its last)                                                     (1)

The segment's regime and regimes of records that are held back are never dropped or merged.

A regime that an operator drops leaves its slot vacant: no record is assigned to it, and the next new regime takes it.
"""
# Shape suffixes: B buckets, O occupied slots, R slots, T buckets of a record.

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import naive_bayes
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.regime_profile import RegimeProfile

CALIBRATED_AT = frozenset(1 << power for power in range(2, 20))
"""Numbers of settled records at which a regime's fit is calibrated, in addition to every shift."""
INDISTINGUISHABLE = 1.5
"""Two profiles are one regime's if their statistic is below: 1 is expected then, and 2 separates real tasks."""


class RegimeScores(NamedTuple):
    """A record's scores under the regime of every slot, in nats; -inf for a vacant slot."""

    log_ratios_R: NDArray[np.float32]
    """Eq. (2) of `naive_bayes`: tokens only."""
    scores_R: NDArray[np.float32]
    """Eq. (3): tokens and length. The largest belongs to the likeliest regime."""


SavedProfiles = tuple[RegimeProfile | None, ...]
"""A copy of the memory by slot, None for a vacant one. Its profiles are never written to; copies share a profile while
it does not change."""


class RegimeMemory:
    """Profiles by slot; the lowest free slot is taken first."""

    def __init__(self, max_regimes: int) -> None:
        self._max_regimes = max_regimes
        self._counts_RB = np.zeros((max_regimes, NUM_BUCKETS), dtype=np.float32)
        self._columns = np.zeros((3, max_regimes), dtype=np.float32)  # tokens, length mean, length deviation
        self._profiles: list[RegimeProfile | None] = []
        self._vacant: list[int] = []
        """Slots below the length that have no profile, in order."""
        self._saved: list[RegimeProfile | None] = []
        """The copy of each profile that `save` returned last; None if it has changed since, or the slot is vacant."""
        self._next_number = 1

    def __len__(self) -> int:
        """Number of slots in use so far, vacant ones among them."""
        return len(self._profiles)

    def __getitem__(self, slot: int) -> RegimeProfile:
        profile = self._profiles[slot]
        assert profile is not None, f"slot {slot} is vacant"
        return profile

    @property
    def occupied(self) -> list[int]:
        """Slots that have a regime, in order."""
        return [slot for slot, profile in enumerate(self._profiles) if profile is not None]

    def log_ratios(
        self, buckets: NDArray[np.uint16], excluded: Mapping[int, NDArray[np.float32]] | None = None
    ) -> NDArray[np.float32]:
        """Eq. (2) of `naive_bayes` under every regime, with the token counts in `excluded`, by slot, subtracted."""
        used = len(self)
        totals_R = self._columns[0, :used]
        c_RT = self._counts_RB[:used].take(buckets, axis=1)
        for slot, counts_B in (excluded or {}).items():
            c_RT[slot] = np.maximum(c_RT[slot] - counts_B[buckets], 0.0)
            totals_R = np.where(np.arange(used) == slot, totals_R - counts_B.sum(), totals_R)
        if not self._vacant:
            return naive_bayes.log_ratios(c_RT, totals_R)
        log_ratios_R = np.full(used, -np.inf, dtype=np.float32)
        log_ratios_R[self.occupied] = naive_bayes.log_ratios(c_RT[self.occupied], totals_R[self.occupied])
        return log_ratios_R

    def score(self, record: Features, excluded: Mapping[int, NDArray[np.float32]] | None = None) -> RegimeScores:
        """Score a record under every regime; `excluded` is that of `log_ratios`."""
        _, mean_R, deviation_R = self._columns[:, : len(self)]
        log_ratios_R = self.log_ratios(record.buckets, excluded)
        return RegimeScores(log_ratios_R, log_ratios_R + naive_bayes.length_scores(record, mean_R, deviation_R))

    def rank(self, records: Iterable[Features]) -> list[int]:
        """Slots of all regimes, the one that explains the records best first (`naive_bayes`, eq. 3)."""
        total_R = np.sum([self.score(each).scores_R for each in records], axis=0)
        return [int(slot) for slot in np.argsort(-total_R, kind="stable") if slot not in self._vacant]

    def calibrate(self, slots: Iterable[int] | None = None) -> None:
        """Measure how well the regimes, by default all, explain their own exemplars."""
        for slot in self.occupied if slots is None else slots:
            if exemplars := self[slot].exemplars:
                self[slot].calibrate(self.exemplar_fits(slot, exemplars))
                self._saved[slot] = None

    def exemplar_fits(self, slot: int, exemplars: Sequence[NDArray[np.uint16]]) -> NDArray[np.float64]:
        """Log ratios per bucket of records of a regime, each as if it had not been counted."""
        c_RT = self._counts_RB[: len(self)].take(np.concatenate(exemplars), axis=1)
        own_T = np.concatenate([naive_bayes.count_buckets(buckets)[buckets] for buckets in exemplars])
        c_RT[slot] = np.maximum(c_RT[slot] - own_T, 0.0)
        totals_R, row = self._columns[0, : len(self)], slot
        if self._vacant:
            c_RT, totals_R, row = c_RT[self.occupied], totals_R[self.occupied], self.occupied.index(slot)
        terms_T = naive_bayes.bucket_log_ratios(c_RT, totals_R, row)
        ends = np.cumsum([len(buckets) for buckets in exemplars])
        return np.array([part.mean(dtype=np.float64) for part in np.split(terms_T, ends[:-1])])

    def add(self, slot: int, record: Features, ordinal: int) -> None:
        """Count a record in a slot."""
        self[slot].add(record, ordinal)
        self._changed(slot)

    def move(self, record: Features, ordinal: int, old: int, new: int) -> None:
        """Move a record from one slot to another."""
        if old != new:
            self[old].remove(record)
            self._changed(old)
            self.add(new, record, ordinal)

    def postpone_test(self, slot: int) -> None:
        """The regime is no mixture, as far as its records show."""
        self[slot].postpone_test()
        self._saved[slot] = None

    def mark_separated(self, slots: Iterable[int]) -> None:
        """Each record of these regimes was told from the others'."""
        for slot in slots:
            self[slot].is_separated = 1
            self._saved[slot] = None

    def divide(self, slot: int, new: int, moved: Collection[int], ordinal: int) -> None:
        """Divide the sample of a regime between it and the one in `new`; both start over with their part.

        Their recent records must be added again.

        Args:
            slot: The regime's slot.
            new: The slot of a new regime.
            moved: Ordinals of the records that become the new one's.
            ordinal: That of the newest record.
        """
        sample = self[slot].sample
        for each, is_new in ((slot, False), (new, True)):
            self[each].start_over([record for record in sample if (record.ordinal in moved) == is_new])
            self[each].last_record = ordinal
            self._changed(each)

    def settle(self, slot: int, record: Features, ordinal: int, following_ND: NDArray[np.float32]) -> None:
        """Add a record to the slot's reference distribution for good, and offer it to its sample."""
        profile = self[slot]
        profile.reference.add(record.phi_D, following_ND)
        profile.offer(record, ordinal)
        self._saved[slot] = None
        if profile.reference.num_records in CALIBRATED_AT:
            self.calibrate([slot])

    def revisit(self, slot: int) -> None:
        """Count a return of the regime."""
        self[slot].visits += 1
        self._saved[slot] = None

    def create(self, ordinal: int, protected: Collection[int]) -> tuple[int, int | None] | None:
        """Create a regime whose first record is `ordinal`.

        Returns:
            Its slot, and the number of the regime that was dropped or merged to free it. None if all slots are taken
            and `protected`.
        """
        dropped = None
        if self._vacant:
            slot = self._vacant.pop(0)
        elif len(self) < self._max_regimes:
            slot = len(self)
            self._profiles.append(None)
            self._saved.append(None)
        else:
            freed = self._make_room(ordinal, protected)
            if freed is None:
                return None
            slot, dropped = freed, self[freed].number
        self._counts_RB[slot] = 0.0
        self._profiles[slot] = RegimeProfile(self._next_number, ordinal, counts_B=self._counts_RB[slot])
        self._next_number += 1
        self._changed(slot)
        return slot, dropped

    def forget(self, slot: int) -> None:
        """Leave the slot vacant. Its records must be in no segment."""
        self._profiles[slot] = self._saved[slot] = None
        self._vacate(slot)

    def save(self) -> SavedProfiles:
        """Return a copy; only profiles that changed since the last call are copied."""
        for slot, profile in enumerate(self._profiles):
            if self._saved[slot] is None and profile is not None:
                self._saved[slot] = profile.copy()
        return tuple(self._saved)

    def load(self, profiles: SavedProfiles, next_number: int) -> None:
        """Restore what `save` returned."""
        self._counts_RB[:] = 0.0
        self._profiles, self._saved, self._next_number = [], [], next_number
        self._vacant = []
        for slot, each in enumerate(profiles):
            self._profiles.append(None)
            self._saved.append(each)
            if each is None:
                self._vacate(slot)
                continue
            self._counts_RB[slot] = each.counts_B
            self._profiles[slot] = replace(each, counts_B=self._counts_RB[slot], reference=each.reference.copy())
            self._refresh(slot)

    @property
    def next_number(self) -> int:
        """Number of the next new regime."""
        return self._next_number

    def _make_room(self, ordinal: int, protected: Collection[int]) -> int | None:
        """Merge or drop a regime and return its slot."""
        candidates = [slot for slot in self.occupied if slot not in protected]
        if not candidates:
            return None
        if pair := self._indistinguishable_pair(candidates):
            kept, merged = pair
            self[kept].merge(self[merged])
            self._changed(kept)
            return merged
        return min(candidates, key=lambda slot: self._worth(slot, ordinal))

    def _worth(self, slot: int, ordinal: int) -> float:
        """Eq. (1)."""
        profile = self[slot]
        return profile.records / (1 + ordinal - profile.last_record)

    def _indistinguishable_pair(self, candidates: list[int]) -> tuple[int, int] | None:
        """The two closest slots, the older regime first, if the change test takes them for one regime."""
        test = MeanEmbeddingTest(level=0.5)
        best: tuple[float, int, int] = (INDISTINGUISHABLE, -1, -1)
        for i, one in enumerate(candidates):
            for other in candidates[i + 1 :]:
                a, b = self[one].reference, self[other].reference
                if min(a.num_records, b.num_records) < 2:
                    continue
                distance = test.distance(b.mean.astype(np.float32), int(b.num_records), a)
                best = min(best, (distance, one, other))
        if best[1] < 0:
            return None
        one, other = sorted(best[1:], key=lambda slot: self[slot].number)
        return one, other

    def _vacate(self, slot: int) -> None:
        self._vacant = sorted([*self._vacant, slot])
        self._counts_RB[slot] = 0.0
        self._columns[:, slot] = 0.0, 0.0, 1.0  # any deviation above 0: the score is -inf

    def _changed(self, slot: int) -> None:
        self._saved[slot] = None
        self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        profile = self[slot]
        self._columns[:, slot] = profile.tokens, profile.length_mean, profile.length_deviation
