"""The rules that decide which regime records belong to: single records, and those of an alarm."""
# Shape suffixes: B buckets, D features, R regimes.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.change_tests import Alarm, RecentRecord, TokenChange, stack_x
from streamlearn.shift.features import COMMON, Features
from streamlearn.shift.memory import MATURE, RegimeMemory, RegimeScores, count_buckets, log_ratios
from streamlearn.shift.mixture import MIN_PART, begin_alike, distinctness

MARGIN = 8.0
"""Nats by which another regime must explain a record better than its own to take it."""
MIN_FIT = -2.5
"""Deviations of the lower tail of a regime's fit below which a single record does not belong to it."""
MIN_COMPARED = 8
"""Records without which the mean of a regime says nothing about a single record."""
PARENT_MARGIN = 0.25
"""Nats per bucket, in addition to `MARGIN`, by which a young regime's parent must explain a record better."""


def assign_record(record: Features, scores: RegimeScores, here: int, parent: int, regimes: RegimeMemory) -> int:
    """Slot of the regime of a record, given the slots of the segment's regime and of the one it was split from."""
    best = int(scores.scores_R.argmax())
    own_records = regimes[here].records
    margin = MARGIN * min(own_records / MATURE, 1.0)  # a young regime has no claim to ambiguous records
    if best == parent and own_records < 2 * MATURE:
        margin = MARGIN + PARENT_MARGIN * len(record.buckets)
    is_clear = scores.scores_R[best] - scores.scores_R[here] > margin and regimes[best].is_mature
    fits = is_clear and regimes[best].tail_fit(float(scores.log_ratios_R[best]), record) > MIN_FIT
    return best if fits and _is_nearer(record, best, here, regimes) else here


def _is_nearer(record: Features, one: int, other: int, regimes: RegimeMemory) -> bool:
    """Whether a record lies nearer to the mean of one regime than to that of the other, as far as both are known."""
    near, far = regimes.reference(one), regimes.reference(other)
    if min(near.num_records, far.num_records) < MIN_COMPARED:
        return True
    return near.distance(record.x_D) <= far.distance(record.x_D)


MIN_RECORDS = 5
"""Records needed to make a regime."""
NEAR_LEVEL = 1e-3
"""Level from which on records are far from a regime that they resemble. It is below the share of returns that may be
refused, because the metric was fitted to the regime's records: fresh ones lie a little further from their mean."""
DISTINCT = 0.0
"""Maximum statistic of the mixture test over the records and a regime's own, if they belong to the regime. Of the same
returns none lies above -0.13, of other tasks' records half. Of alarms in the midst of a task, where neighbors are
alike, 45 % lay below in a trial; of 540 boundaries between other SuperNI tasks, 380 of them bare, one still did after
48 records."""
CLEARLY_DISTINCT, LONG = 0.5, 24
"""Statistic above which, or number of records from which on, records are another task's although they begin with the
segment's instruction."""
MIN_RETURN_FIT = -1.5
"""Deviations from the fit of its records. 1 % of a returning regime's means lie below, and 97 % of other regimes'."""
MIN_OWN_FIT = -0.8
"""The same for records that raised an alarm; bursts of the segment's own regime lie above 0."""
FAR = 5.0
"""Times the threshold that an alarm's statistic reaches where the segment's own records hardly do."""


@dataclass(frozen=True, eq=False)
class Classification:
    """What the records of an alarm are."""

    slot: int
    """Slot of the regime that explains them best."""
    known: bool
    """Whether it explains them as well as its own records; otherwise they are a new regime's."""
    records: tuple[RecentRecord, ...]


def classify(alarm: Alarm, recent: tuple[RecentRecord, ...], here: int, regimes: RegimeMemory) -> Classification:
    """Classify the records of an alarm; `here` is the slot of the segment's regime.

    1. If a token appeared or disappeared, they have left the segment's regime, unless most are copies of each other.
    2. Records of the segment that are not another known regime's are reduced to those that its regime does not
       explain, out of all `recent` records.
    3. If fewer than `MIN_RECORDS` are left, they belong to the segment after all.
    4. So they do if no known regime explains them, but they are no more distinct from the segment's other records
       than topics of one task are (`_are_topics`).
    """
    if alarm.token_change and not _are_copies(alarm.records):  # 1.
        return _classify_token_change(alarm.records, alarm.token_change, here, regimes)
    far = alarm.statistic > FAR * alarm.threshold
    likeliest = _likeliest(alarm.records, here, regimes, far=far)
    if alarm.records[0].slot == here and (not likeliest.known or likeliest.slot == here):
        unexplained = _unexplained(alarm.records, recent, here, regimes)  # 2.
        if len(unexplained) < MIN_RECORDS:
            return Classification(here, True, unexplained)  # 3.
        likeliest = _likeliest(unexplained, here, regimes, far=far)
        if not likeliest.known and _are_topics(unexplained, recent, here, regimes):
            return Classification(here, True, unexplained)  # 4.
    return likeliest


def _likeliest(records: tuple[RecentRecord, ...], here: int, regimes: RegimeMemory, *, far: bool) -> Classification:
    """The regime with the largest score, by tokens and length.

    `far`: whether they are so far from the segment's that their tokens alone do not make them its own: a regime whose
    records fit it unevenly takes any.
    """
    scores = _score(records, regimes)
    slot = int(np.sum([score.scores_R for score in scores], axis=0).argmax())
    profile = regimes[slot]
    pairs = zip(scores, records, strict=True)
    fit = float(np.mean([profile.fit(float(score.log_ratios_R[slot]), record.features) for score, record in pairs]))
    distinct = _distinctness(records, profile.exemplars)
    if slot == here:
        is_other = far and distinct is not None and distinct > CLEARLY_DISTINCT
        return Classification(slot, fit > MIN_OWN_FIT and not is_other, records)
    explained = fit > MIN_RETURN_FIT and _is_near(records, slot, regimes) and (distinct is None or distinct <= DISTINCT)
    return Classification(slot, explained, records)


def _classify_token_change(
    records: tuple[RecentRecord, ...], change: TokenChange, here: int, regimes: RegimeMemory
) -> Classification:
    """The regime with the largest score, by tokens, length and the frequency of the token that changed."""
    frequencies = {slot: regimes[slot].token_frequency for slot in regimes.occupied}
    for record in records:  # as if they had not been counted
        frequencies[record.slot] = frequencies[record.slot].without(record.features.buckets)
    frequency_R = np.full(len(regimes), 0.5, dtype=np.float32)  # of a vacant slot, whose score is -inf
    for slot, frequency in frequencies.items():
        frequency_R[slot] = frequency.expected[change.bucket]
    agreeing_R = frequency_R if change.appeared else 1 - frequency_R
    scores = _score(records, regimes)
    scores_R = np.sum([score.scores_R for score in scores], axis=0) + len(records) * np.log(agreeing_R)
    slot = int(scores_R.argmax())
    agrees = slot != here and float(agreeing_R[slot]) > COMMON
    return Classification(slot, agrees and _is_near(records, slot, regimes), records)


def _unexplained(
    suspects: tuple[RecentRecord, ...], recent: tuple[RecentRecord, ...], here: int, regimes: RegimeMemory
) -> tuple[RecentRecord, ...]:
    """The recent records that explain each other better than their regimes do.

    Records from the change point on (`suspects`) need no clear evidence; records before it and records of another
    regime do.
    """
    chosen = suspects
    for _ in range(3):
        chosen_B = _count(chosen)
        better = tuple(
            record
            for record in recent
            if _evidence(record, chosen_B, here, regimes, inside=record in chosen)
            > (-MARGIN if record in suspects else MARGIN)
        )
        if better == chosen or not better:
            return better
        chosen = better
    return chosen


def _score(records: Sequence[RecentRecord], regimes: RegimeMemory) -> list[RegimeScores]:
    """Scores of each record, as if none of them had been counted."""
    slots = {record.slot for record in records}
    excluded = {slot: _count([record for record in records if record.slot == slot]) for slot in slots}
    return [regimes.score(record.features, excluded) for record in records]


def _is_near(records: Sequence[RecentRecord], slot: int, regimes: RegimeMemory) -> bool:
    """Whether the change test takes the records for the regime's, or the regime has no committed records yet."""
    reference = regimes.reference(slot)
    if reference.num_records < 2:
        return True
    n = len(records)
    return reference.statistic(stack_x(records).mean(axis=0), n) < reference.threshold(NEAR_LEVEL, n)


def _are_topics(
    records: Sequence[RecentRecord], recent: Sequence[RecentRecord], here: int, regimes: RegimeMemory
) -> bool:
    """Whether records are no more distinct from the segment's others than topics of one task are.

    Those that begin with the same instruction as the others are another task's only if they are clearly distinct,
    or continue for long. False if the segment has too few others to tell.
    """
    others = [record.features.buckets for record in recent if record.slot == here and record not in records]
    own = (*regimes[here].exemplars, *others)
    distinct = _distinctness(records, own)
    if distinct is None or distinct > CLEARLY_DISTINCT:
        return False
    if distinct <= DISTINCT:
        return True
    return len(records) < LONG and begin_alike([*(record.features.buckets for record in records), *own])


def _distinctness(records: Sequence[RecentRecord], own: Sequence[NDArray[np.uint16]]) -> float | None:
    """How clearly the mixture test would split these records from a regime's own.

    A regime of many topics explains records of any topic. None if it has too few records, or if these are copies of
    each other, which are distinct from anything.
    """
    if len(own) < MIN_PART or _are_copies(records):
        return None
    return distinctness([record.features.buckets for record in records], own)


def _are_copies(records: Sequence[RecentRecord]) -> bool:
    """Whether at most half of the records are different ones."""
    return 2 * len({record.features.buckets.tobytes() for record in records}) <= len(records)


def _evidence(
    record: RecentRecord, chosen_B: NDArray[np.float32], here: int, regimes: RegimeMemory, *, inside: bool
) -> float:
    """Nats by which the chosen records explain a record better than its regime does, itself not counted."""
    own_B = count_buckets(record.features.buckets)
    old_B = regimes[record.slot].counts_B
    if record.slot == here:
        old_B = old_B - chosen_B  # counted in the segment's regime; in another they are too few to matter
    if not inside or record.slot != here:
        old_B = old_B - own_B
    new_B = chosen_B - own_B if inside else chosen_B
    pair_2B = np.maximum(np.stack([new_B, old_B]), 0.0)
    new, old = log_ratios(pair_2B[:, record.features.buckets], pair_2B.sum(axis=1))
    return float(new - old)


def _count(records: Sequence[RecentRecord]) -> NDArray[np.float32]:
    return count_buckets(np.concatenate([record.features.buckets for record in records]))
