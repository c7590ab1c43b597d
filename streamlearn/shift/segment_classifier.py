"""What the records behind an alarm are: a known regime's, the stretch's own after all, or something new."""
# Shape suffixes: B buckets, D features, R regimes.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import document_frequency as shares
from streamlearn.shift import naive_bayes as words
from streamlearn.shift.featurizer import Features
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.regime_memory import Likelihoods, RegimeMemory
from streamlearn.shift.token_presence_test import TokenChange

MARGIN = 8.0
"""Nats by which one regime must explain a record better than another to own it."""
NEAR = 1.25
"""Thresholds of the change test within which records may lie from a regime that returns."""
FITS = -1.5
"""The same for the mean of several: 1 % of a returning regime's lie below, 97 % of others'."""
FITS_STILL = -0.8
"""The same for several that made an alarm ring: bursts of the stretch's own regime lie above 0."""


@dataclass(frozen=True, eq=False)
class RecentRecord:
    """A record that may still change its regime."""

    record: Features
    ordinal: int
    slot: int
    log_ratio: float
    """For its slot, when it came."""

    @property
    def fit(self) -> float:
        """The log ratio per bucket."""
        return self.log_ratio / len(self.record.buckets)


@dataclass(frozen=True)
class SegmentClassifier:
    """Asks the memory; it holds no state. `here` is the slot of the stretch's regime."""

    regimes: RegimeMemory
    test: MeanEmbeddingTest

    def likeliest(self, fresh: tuple[RecentRecord, ...], here: int) -> tuple[int, bool]:
        """The regime that explains the records best, and whether it explains them as well as its own."""
        weights = self._weigh(fresh)
        slot = int(np.sum([each.scores_R for each in weights], axis=0).argmax())
        profile = self.regimes[slot]
        pairs = zip(weights, fresh, strict=True)
        fits = [profile.fit(float(weight.log_ratios_R[slot]), each.record) for weight, each in pairs]
        if slot == here:
            return slot, float(np.mean(fits)) > FITS_STILL
        return slot, float(np.mean(fits)) > FITS and self._near(fresh, slot)

    def with_token_change(self, fresh: tuple[RecentRecord, ...], change: TokenChange, here: int) -> tuple[int, bool]:
        """The same by words and by the share of one of them, which the stretch's regime does not have."""
        share_R = self._having(change.word, fresh)
        agreeing_R = share_R if change.came else 1 - share_R
        scores_R = np.sum([each.scores_R for each in self._weigh(fresh)], axis=0) + len(fresh) * np.log(agreeing_R)
        slot = int(scores_R.argmax())
        agrees = slot != here and float(agreeing_R[slot]) > shares.COMMON
        return slot, agrees and self._near(fresh, slot)

    def unexplained(
        self, fresh: tuple[RecentRecord, ...], recent: tuple[RecentRecord, ...], here: int
    ) -> tuple[RecentRecord, ...]:
        """Of the recent records, those that explain each other better than the regimes they are in do.

        From the change point on they need not do so clearly; before it, or where another regime owns them, they must.
        """
        chosen = fresh
        for _ in range(3):
            new_B = words.count(np.concatenate([each.record.buckets for each in chosen]))
            found = tuple(
                each
                for each in recent
                if self._ratio(each, new_B, here, inside=each in chosen) > (-MARGIN if each in fresh else MARGIN)
            )
            if found == chosen or not found:
                return found
            chosen = found
        return chosen

    def _weigh(self, fresh: tuple[RecentRecord, ...]) -> list[Likelihoods]:
        """How each looks from every slot, had none of them been counted."""
        less = {
            slot: words.count(np.concatenate([each.record.buckets for each in fresh if each.slot == slot]))
            for slot in {each.slot for each in fresh}
        }
        return [self.regimes.weigh(each.record, less) for each in fresh]

    def _having(self, word: int, fresh: tuple[RecentRecord, ...]) -> NDArray[np.float32]:
        """Share of every regime's records that have the word, had none of these been counted; never 0 nor 1."""
        counted = [self.regimes[slot].shares for slot in range(len(self.regimes))]
        for each in fresh:
            counted[each.slot] = counted[each.slot].without(each.record.buckets)
        return np.array([each.expected[word] for each in counted], dtype=np.float32)

    def _near(self, fresh: tuple[RecentRecord, ...], slot: int) -> bool:
        """Whether the change test takes them for the regime's."""
        reference = self.regimes[slot].reference
        mean_D = np.mean([each.record.phi_D for each in fresh], axis=0)
        return self.test.distance(mean_D, len(fresh), reference) < NEAR * self.test.threshold(reference)

    def _ratio(self, each: RecentRecord, new_B: NDArray[np.float32], here: int, *, inside: bool) -> float:
        """Nats by which a record's words speak for the new records against its slot, itself in neither."""
        own_B = words.count(each.record.buckets)
        old_B = self.regimes[each.slot].counts_B
        if each.slot == here:
            old_B = old_B - new_B  # the stretch has counted them; another regime's are too few to matter
        if not inside or each.slot != here:
            old_B = old_B - own_B
        new_B = new_B - own_B if inside else new_B
        pair_2B = np.maximum(np.stack([new_B, old_B]), 0.0)
        new, old = words.log_ratios(pair_2B[:, each.record.buckets], pair_2B.sum(axis=1))
        return float(new - old)
