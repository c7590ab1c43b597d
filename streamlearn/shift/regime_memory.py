"""The memory of regimes: at most `max_regimes` sketches, each in a slot.

When a new regime needs a slot and none is free, the two regimes whose sketches the change test cannot tell apart are
merged; where every pair differs, the regime is dropped that would be missed least:

    worth = records / (1 + records seen since its last)                                                     (1)

A regime that occurs among the records held back, or is the stretch's own, is never dropped or merged.
"""
# Shape suffixes: B buckets, R regimes.

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift import naive_bayes as words
from streamlearn.shift import ragged
from streamlearn.shift.document_frequency import DocumentFrequency, window_counts
from streamlearn.shift.featurizer import NUM_BUCKETS, Features
from streamlearn.shift.mean_embedding_test import MeanEmbeddingTest
from streamlearn.shift.reference_distribution import ReferenceDistribution
from streamlearn.shift.regime_profile import NUM_EXEMPLARS, SCALARS, RegimeProfile

CALIBRATED_AT = frozenset(1 << power for power in range(2, 20))
"""Settled records at which a regime's fit is calibrated, beside every shift."""
INDISTINGUISHABLE = 1.5
"""Two sketches are one regime when their statistic is below: 1 is expected, 2 separates real tasks."""


@dataclass(frozen=True)
class RegimeSummary:
    """A regime as a status page shows it."""

    number: int
    slot: int
    first_record: int
    last_record: int
    records: int
    visits: int


class Likelihoods(NamedTuple):
    """How a record looks from every slot."""

    log_ratios_R: NDArray[np.float32]
    """Nats by which the regime explains the record's words better than records in general do."""
    scores_R: NDArray[np.float32]
    """The same with the length: the largest names the likeliest regime."""


Frozen = tuple[RegimeProfile, ...]
"""A copy of the memory: sketches that nobody writes to, shared between copies while they do not change."""


class RegimeMemory:
    """Sketches by slot; slots are filled from 0."""

    def __init__(self, max_regimes: int) -> None:
        self._max_regimes = max_regimes
        self._counts_RB = np.zeros((max_regimes, NUM_BUCKETS), dtype=np.float32)
        self._columns = np.zeros((3, max_regimes), dtype=np.float32)  # tokens, length mean, length deviation
        self._profiles: list[RegimeProfile] = []
        self._frozen: list[RegimeProfile | None] = []
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._profiles)

    def __getitem__(self, slot: int) -> RegimeProfile:
        return self._profiles[slot]

    def weigh(self, record: Features, less: Mapping[int, NDArray[np.float32]] | None = None) -> Likelihoods:
        """What the record's words, and its words and length, say for every slot, `less` taken out of the counts."""
        used = len(self)
        totals_R, mean_R, deviation_R = self._columns[:, :used]
        c_RT = self._counts_RB[:used].take(record.buckets, axis=1)
        for slot, counts_B in (less or {}).items():
            c_RT[slot] = np.maximum(c_RT[slot] - counts_B[record.buckets], 0.0)
            totals_R = np.where(np.arange(used) == slot, totals_R - counts_B.sum(), totals_R)
        log_ratios = words.log_ratios(c_RT, totals_R)
        return Likelihoods(log_ratios, log_ratios + words.length_scores(record, mean_R, deviation_R))

    def assign(self, records: Iterable[Features]) -> list[int]:
        """The slot of the likeliest regime of each record, seen by itself (`words`, eq. 3 and 4)."""
        missing = words.MissingTokens.of(np.stack([profile.shares.expected for profile in self._profiles]))
        return [int((self.weigh(each).scores_R + missing.scores(each.buckets)).argmax()) for each in records]

    def calibrate(self, slots: Iterable[int] | None = None) -> None:
        """Ask the regimes anew how well they explain their own records; all of them unless told."""
        for slot in range(len(self)) if slots is None else slots:
            if self._profiles[slot].exemplars:
                self._profiles[slot].calibrate(self._exemplar_fits(slot))
                self._frozen[slot] = None

    def add(self, slot: int, record: Features, ordinal: int) -> None:
        """Count a record's words in a slot."""
        self._profiles[slot].add(record, ordinal)
        self._changed(slot)

    def move(self, record: Features, ordinal: int, old: int, new: int) -> None:
        """Take a record out of one slot and put it into another."""
        if old != new:
            self._profiles[old].remove(record)
            self._changed(old)
            self.add(new, record, ordinal)

    def settle(self, slot: int, record: Features, following_ND: NDArray[np.float32]) -> None:
        """Take a record into the slot's reference for good, and perhaps among its exemplars."""
        profile = self._profiles[slot]
        profile.reference.add(record.phi_D, following_ND)
        profile.keep(record)
        self._frozen[slot] = None
        if profile.reference.num_records in CALIBRATED_AT:
            self.calibrate([slot])

    def revisit(self, slot: int) -> None:
        """Count a return of the regime."""
        self._profiles[slot].visits += 1
        self._frozen[slot] = None

    def create(self, ordinal: int, protected: Collection[int]) -> tuple[int, int | None] | None:
        """A slot for a new regime and the number of the one that made room; None while all are protected."""
        number = self._next_number
        if len(self) < self._max_regimes:
            self._profiles.append(RegimeProfile(number, ordinal, counts_B=self._counts_RB[len(self)]))
            self._frozen.append(None)
            slot, dropped = len(self) - 1, None
        else:
            freed = self._make_room(ordinal, protected)
            if freed is None:
                return None
            slot, dropped = freed, self._profiles[freed].number
            self._counts_RB[slot] = 0.0
            self._profiles[slot] = RegimeProfile(number, ordinal, counts_B=self._counts_RB[slot])
        self._next_number += 1
        self._changed(slot)
        return slot, dropped

    def views(self) -> tuple[RegimeSummary, ...]:
        """All regimes, by slot."""
        return tuple(
            RegimeSummary(each.number, slot, each.first_record, each.last_record, each.records, each.visits)
            for slot, each in enumerate(self._profiles)
        )

    def freeze(self) -> Frozen:
        """A copy; only what changed since the last one is copied."""
        for slot, profile in enumerate(self._profiles):
            if self._frozen[slot] is None:
                self._frozen[slot] = profile.copy()
        return tuple(each for each in self._frozen if each is not None)

    def thaw(self, frozen: Frozen, next_number: int) -> None:
        """Become what was frozen."""
        self._counts_RB[:] = 0.0
        self._profiles, self._frozen, self._next_number = [], [], next_number
        for slot, each in enumerate(frozen):
            self._counts_RB[slot] = each.counts_B
            self._profiles.append(replace(each, counts_B=self._counts_RB[slot], reference=each.reference.copy()))
            self._frozen.append(each)
            self._refresh(slot)

    @property
    def next_number(self) -> int:
        """Number of the next new regime."""
        return self._next_number

    def _exemplar_fits(self, slot: int) -> NDArray[np.float64]:
        """Log ratios per bucket of a regime's exemplars, each as if it had not been counted."""
        exemplars = self._profiles[slot].exemplars
        c_RT = self._counts_RB[: len(self)].take(np.concatenate(exemplars), axis=1)
        own_T = np.concatenate([words.count(buckets)[buckets] for buckets in exemplars])
        c_RT[slot] = np.maximum(c_RT[slot] - own_T, 0.0)
        terms_T = words.bucket_log_ratios(c_RT, self._columns[0, : len(self)], slot)
        ends = np.cumsum([len(buckets) for buckets in exemplars])
        return np.array([part.mean(dtype=np.float64) for part in np.split(terms_T, ends[:-1])])

    def _make_room(self, ordinal: int, protected: Collection[int]) -> int | None:
        free = [slot for slot in range(len(self)) if slot not in protected]
        if not free:
            return None
        if twins := self._twins(free):
            kept, merged = twins
            self._merge(kept, merged)
            return merged
        return min(free, key=lambda slot: self._worth(slot, ordinal))

    def _worth(self, slot: int, ordinal: int) -> float:
        """Eq. (1)."""
        profile = self._profiles[slot]
        return profile.records / (1 + ordinal - profile.last_record)

    def _twins(self, free: list[int]) -> tuple[int, int] | None:
        """The two nearest slots, the older regime first, if their sketches are one regime's."""
        test = MeanEmbeddingTest(level=0.5)
        best: tuple[float, int, int] = (INDISTINGUISHABLE, -1, -1)
        for i, one in enumerate(free):
            for other in free[i + 1 :]:
                a, b = self._profiles[one].reference, self._profiles[other].reference
                if min(a.num_records, b.num_records) < 2:
                    continue
                distance = test.distance(b.mean.astype(np.float32), int(b.num_records), a)
                best = min(best, (distance, one, other))
        if best[1] < 0:
            return None
        one, other = sorted(best[1:], key=lambda slot: self._profiles[slot].number)
        return one, other

    def _merge(self, kept: int, merged: int) -> None:
        a, b = self._profiles[kept], self._profiles[merged]
        a.counts_B += b.counts_B
        for name in ("visits", "records", "tokens", "length_sum", "length_squares"):
            setattr(a, name, getattr(a, name) + getattr(b, name))
        a.last_record = max(a.last_record, b.last_record)
        a.reference.join(b.reference)
        a.shares = a.shares.joined(b.shares)
        a.exemplars = (*a.exemplars, *b.exemplars)[:NUM_EXEMPLARS]
        self._changed(kept)

    def _changed(self, slot: int) -> None:
        self._frozen[slot] = None
        self._refresh(slot)

    def _refresh(self, slot: int) -> None:
        profile = self._profiles[slot]
        self._columns[:, slot] = profile.tokens, profile.length_mean, profile.length_deviation


def to_arrays(frozen: Frozen) -> dict[str, NDArray[np.generic]]:
    """Plain arrays, one row a slot."""
    return {
        "regimes.counts": _rows([each.counts_B for each in frozen], np.float32, NUM_BUCKETS),
        "regimes.scalars": _rows(
            [np.array([getattr(each, name) for name in SCALARS], dtype=np.float64) for each in frozen],
            np.float64,
            len(SCALARS),
        ),
        "regimes.references": _rows(
            [each.reference.to_row() for each in frozen], np.float64, ReferenceDistribution.ROW
        ),
        "regimes.shares": _rows([each.shares.records_B for each in frozen], np.float32, NUM_BUCKETS),
        "regimes.shares.numbers": np.array([each.shares.number for each in frozen], dtype=np.float64),
        "regimes.exemplars": np.array([len(each.exemplars) for each in frozen], dtype=np.int64),
        **ragged.to_arrays("regimes.exemplars", [buckets for each in frozen for buckets in each.exemplars]),
    }


def from_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> Frozen:
    """The inverse of `to_arrays`."""
    frozen = []
    integers = ("number", "visits", "records", "first_record", "last_record")
    exemplars = iter(ragged.from_arrays("regimes.exemplars", arrays))
    for slot, num_exemplars in enumerate(arrays["regimes.exemplars"].tolist()):
        scalars = zip(SCALARS, arrays["regimes.scalars"][slot].tolist(), strict=True)
        values = {name: int(value) if name in integers else value for name, value in scalars}
        kept = tuple(islice(exemplars, num_exemplars))
        frozen.append(
            RegimeProfile(
                counts_B=np.array(arrays["regimes.counts"][slot], dtype=np.float32),
                reference=ReferenceDistribution.from_row(
                    np.asarray(arrays["regimes.references"][slot], dtype=np.float64)
                ),
                shares=_shares(arrays, slot, kept),
                exemplars=kept,
                **values,
            )
        )
    return tuple(frozen)


def _shares(
    arrays: Mapping[str, NDArray[np.generic]], slot: int, exemplars: Sequence[NDArray[np.uint16]]
) -> DocumentFrequency:
    """Snapshots from before shares were counted have the exemplars alone."""
    if "regimes.shares" not in arrays:
        return DocumentFrequency(window_counts(exemplars), float(len(exemplars)))
    records_B = np.array(arrays["regimes.shares"][slot], dtype=np.float32)
    return DocumentFrequency(records_B, float(arrays["regimes.shares.numbers"][slot]))


def _rows(rows: list[NDArray[np.floating]], dtype: type, width: int) -> NDArray[np.floating]:
    return np.array(rows, dtype=dtype).reshape(len(rows), width)
