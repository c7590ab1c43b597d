"""Classification of the records of an alarm: the segment's regime after all, another known regime, or a new one."""
# Shape suffixes: B buckets, D features, R regimes.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.alarm import Alarm
from streamlearn.shift.document_frequency import COMMON
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.mixture_test import MIN_PART, begin_alike, distinctness
from streamlearn.shift.naive_bayes import count_buckets, log_ratios
from streamlearn.shift.recent_record import RecentRecord
from streamlearn.shift.record_assigner import MARGIN
from streamlearn.shift.regime_memory import RegimeMemory, RegimeScores
from streamlearn.shift.token_presence_test import TokenChange

MIN_RECORDS = 5
"""Records needed to make a regime."""
NEAR = 0.65
"""Maximum distance of records to a regime that returns, in thresholds of the change test. Of the returns of SuperNI's
fifteen tasks without definitions none lies above 0.61, of other tasks' records with the regime as their nearest 7 in
10."""
DISTINCT = 0.0
"""Maximum statistic of the mixture test over the records and a regime's own, if they are the regime's. Of the same
returns none lies above -0.13, of other tasks' records half. Of alarms in the midst of a task, where neighbours are
alike, 45 % lay below in a trial; of 540 boundaries between other SuperNI tasks, 380 of them bare, one still did after
48 records."""
CLEARLY_DISTINCT, LONG = 0.5, 24
"""Statistic above which, or number of records from which on, records are another task's although they begin with the
segment's instruction."""
MIN_FIT = -1.5
"""Deviations from the usual fit. 1 % of a returning regime's means lie below, and 97 % of other regimes' means."""
MIN_OWN_FIT = -0.8
"""The same for records that raised an alarm; bursts of the segment's own regime lie above 0."""


@dataclass(frozen=True)
class Classification:
    """What the records of an alarm are."""

    slot: int
    """Slot of the regime that explains them best."""
    known: bool
    """Whether it explains them as well as its own records; otherwise they are a new regime's."""
    records: tuple[RecentRecord, ...]


@dataclass(frozen=True)
class SegmentClassifier:
    """The rules; it holds no state. `here` is the slot of the segment's regime."""

    regimes: RegimeMemory
    test: MeanEmbeddingTest

    def classify(self, alarm: Alarm, recent: tuple[RecentRecord, ...], here: int) -> Classification:
        """Classify the records of an alarm.

        1. Where a token appeared or disappeared, they have left the segment's regime.
        2. Records of the segment that are not another known regime's are reduced to those that its regime does not
           explain, out of all `recent` records.
        3. If fewer than `MIN_RECORDS` are left, they are the segment's after all.
        4. So they are if no known regime explains them, but they are no more distinct from the segment's other records
           than topics of one task are (`_are_topics`).
        """
        if alarm.token_change:  # 1.
            return self._classify_token_change(alarm.records, alarm.token_change, here)
        found = self._likeliest(alarm.records, here)
        if alarm.records[0].slot == here and (not found.known or found.slot == here):
            unexplained = self._unexplained(alarm.records, recent, here)  # 2.
            if len(unexplained) < MIN_RECORDS:
                return Classification(here, True, unexplained)  # 3.
            found = self._likeliest(unexplained, here)
            if not found.known and self._are_topics(unexplained, recent, here):
                return Classification(here, True, unexplained)  # 4.
        return found

    def _likeliest(self, records: tuple[RecentRecord, ...], here: int) -> Classification:
        """The regime with the largest score, by tokens and length."""
        scores = self._score(records)
        slot = int(np.sum([each.scores_R for each in scores], axis=0).argmax())
        profile = self.regimes[slot]
        pairs = zip(scores, records, strict=True)
        fits = [profile.fit(float(score.log_ratios_R[slot]), each.features) for score, each in pairs]
        if slot == here:
            return Classification(slot, float(np.mean(fits)) > MIN_OWN_FIT, records)
        explained = float(np.mean(fits)) > MIN_FIT and self._is_near(records, slot)
        if explained:
            distinct = self._distinctness(records, self.regimes[slot].exemplars)
            explained = distinct is None or distinct <= DISTINCT
        return Classification(slot, explained, records)

    def _classify_token_change(
        self, records: tuple[RecentRecord, ...], change: TokenChange, here: int
    ) -> Classification:
        """The regime with the largest score, by tokens, length and the frequency of the token that changed."""
        frequency_R = self._token_frequency(change.bucket, records)
        agreeing_R = frequency_R if change.appeared else 1 - frequency_R
        scores_R = np.sum([each.scores_R for each in self._score(records)], axis=0) + len(records) * np.log(agreeing_R)
        slot = int(scores_R.argmax())
        agrees = slot != here and float(agreeing_R[slot]) > COMMON
        return Classification(slot, agrees and self._is_near(records, slot), records)

    def _unexplained(
        self, suspects: tuple[RecentRecord, ...], recent: tuple[RecentRecord, ...], here: int
    ) -> tuple[RecentRecord, ...]:
        """The recent records that explain each other better than their regimes do.

        Records from the change point on (`suspects`) need no clear evidence; records before it and records of another
        regime do.
        """
        chosen = suspects
        for _ in range(3):
            chosen_B = _count(chosen)
            found = tuple(
                each
                for each in recent
                if self._evidence(each, chosen_B, here, inside=each in chosen)
                > (-MARGIN if each in suspects else MARGIN)
            )
            if found == chosen or not found:
                return found
            chosen = found
        return chosen

    def _score(self, records: Sequence[RecentRecord]) -> list[RegimeScores]:
        """Scores of each record, as if none of them had been counted."""
        slots = {each.slot for each in records}
        excluded = {slot: _count([each for each in records if each.slot == slot]) for slot in slots}
        return [self.regimes.score(each.features, excluded) for each in records]

    def _token_frequency(self, bucket: int, records: Sequence[RecentRecord]) -> NDArray[np.float32]:
        """Share of each regime's records with the token, as if `records` had not been counted; never 0 or 1."""
        frequencies = {slot: self.regimes[slot].token_frequency for slot in self.regimes.occupied}
        for each in records:
            frequencies[each.slot] = frequencies[each.slot].without(each.features.buckets)
        shares_R = np.full(len(self.regimes), 0.5, dtype=np.float32)  # of a vacant slot, whose score is -inf
        for slot, frequency in frequencies.items():
            shares_R[slot] = frequency.expected[bucket]
        return shares_R

    def _is_near(self, records: Sequence[RecentRecord], slot: int) -> bool:
        """Whether the change test takes the records for the regime's, or none of its own is settled yet."""
        reference = self.regimes[slot].reference
        if reference.num_records < 2:
            return True
        mean_D = np.mean([each.features.phi_D for each in records], axis=0)
        return self.test.distance(mean_D, len(records), reference) < NEAR * self.test.threshold(reference)

    def _are_topics(self, records: Sequence[RecentRecord], recent: Sequence[RecentRecord], here: int) -> bool:
        """Whether records are no more distinct from the segment's others than topics of one task are.

        Those that begin with the same instruction as the others are another task's only if they are clearly distinct,
        or go on for long. False if the segment has too few others to tell.
        """
        others = [each.features.buckets for each in recent if each.slot == here and each not in records]
        own = (*self.regimes[here].exemplars, *others)
        distinct = self._distinctness(records, own)
        if distinct is None or distinct > CLEARLY_DISTINCT:
            return False
        if distinct <= DISTINCT:
            return True
        return len(records) < LONG and begin_alike([*(each.features.buckets for each in records), *own])

    @staticmethod
    def _distinctness(records: Sequence[RecentRecord], own: Sequence[NDArray[np.uint16]]) -> float | None:
        """How clearly the mixture test would split these records from a regime's own; None if it has too few.

        A regime of many topics explains records of any topic.
        """
        if len(own) < MIN_PART:
            return None
        return distinctness([each.features.buckets for each in records], own)

    def _evidence(self, record: RecentRecord, chosen_B: NDArray[np.float32], here: int, *, inside: bool) -> float:
        """Nats by which the chosen records explain a record better than its regime does, itself not counted."""
        own_B = count_buckets(record.features.buckets)
        old_B = self.regimes[record.slot].counts_B
        if record.slot == here:
            old_B = old_B - chosen_B  # counted in the segment's regime; in another they are too few to matter
        if not inside or record.slot != here:
            old_B = old_B - own_B
        new_B = chosen_B - own_B if inside else chosen_B
        pair_2B = np.maximum(np.stack([new_B, old_B]), 0.0)
        new, old = log_ratios(pair_2B[:, record.features.buckets], pair_2B.sum(axis=1))
        return float(new - old)


def _count(records: Sequence[RecentRecord]) -> NDArray[np.float32]:
    return count_buckets(np.concatenate([each.features.buckets for each in records]))
