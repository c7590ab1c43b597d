"""Mixture of regimes: whether one regime's records are two regimes' that occurred mixed from the beginning.

    w_ik = sum_(b in i) log((c_kb + a p_b) / (c_k + a)) - log p_b                                           (1)
    m_i = w_(i, own) - w_(i, other)                                                                         (2)
    T = min(q10_i(m_i) / 20, max(min(median_i(m_i / n_i) / 0.75, q10_i(m_i / n_i) / 0.3), d / 10))          (3)

The records are divided in two by hard EM of a mixture of two multinomials (naive Bayes; Celeux & Govaert 1992): each
record i, of n_i buckets, goes to the part k with the larger w_ik. c_kb counts bucket b in part k without record i
itself, and p is the background of both parts. EM starts from the signs of the leading principal components of the
records' tf-idf vectors, the relaxed solution of 2-means (Ding & He 2004); the one that ends with the largest T counts.

Any division found in this way fits better than none: every task has topics. So the test does not ask whether two
components fit better than one, but whether every record belongs to its part as clearly as records of different tasks
do: by their words throughout, or by d common tokens, those that one part has more often than the other by 0.9 of its
records, such as an instruction before long and varied texts. m_i is the margin of a record that the parts have not
seen, and q10 the 10 % quantile. The constants lie between single tasks and mixtures of 2 to 20 of them, drawn from 391
tasks (SuperNI, TRACE). A test at a nominal level would reject every real task, given enough records.

Records that occur more than once count once; otherwise copies would vouch for each other. A part that is a single run
of the stream, or two, may be a change, or a file in the order of its texts. The tests of changes decide about those,
once the regime is old enough for them (`YOUNG`), or if its records begin with the same instruction: then the parts are
rather texts about which one task asks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.features import NUM_BUCKETS

# Shape suffixes: B buckets, K parts (2), N records, T buckets of all records, V distinct buckets.


MIN_TESTED = 16
"""Distinct records without which nothing is tested."""
MIN_PART = 4
"""Records of the smaller part: fewer are taken for outliers."""
MIN_PART_SHARE = 1 / 8
"""Share of the smaller part: a few questions on one text stand out as clearly as another task."""
SMOOTHING = 200.0
"""The a of eq. (1), in tokens: less than in `memory`, since the parts have few records."""
MEDIAN_MARGIN, LOW_MARGIN = 0.75, 0.3
"""Nats per bucket, in eq. (3)."""
LOW_MARGIN_NATS = 20.0
"""Nats per record, in eq. (3): short inputs reach the margins per bucket by chance."""
LIKELY, UNLIKELY = 1.0, 1.5
"""Thresholds of T: of regimes that may well be mixtures, and of those that began with a change, when the stream was of
one regime at a time. With the first for all, one in ten of the shifts between bare inputs would be a split in error."""
MIN_RUNS = 3
"""Uninterrupted runs of the stream that the smaller part must consist of, unless the regime is young."""
YOUNG = 128
"""Records up to which a regime is young: twice the default `shift.min_dwell_records`."""
SAME_INSTRUCTION = 16
"""First tokens that records of one instruction share; "Definition: In this task, you are given a" has fewer."""
NUM_COMMON = 10
"""The 10 common tokens of eq. (3). Templates within a task (a choice of two forms of question) differ in fewer."""
COMMON_DIFFERENCE = 0.9
LOW = 0.1
NUM_STARTS = 4
MAX_ITERATIONS = 20

Division = NDArray[np.bool_]
"""Which records belong to the second part, (N)."""


@dataclass(frozen=True)
class Separation:
    """Records that are two regimes'."""

    statistic: float
    """T of eq. (3)."""
    is_smaller: tuple[bool, ...]
    """Which of the records belong to the smaller part. Of equal parts it is the one without the first record."""


def separate(
    records: Sequence[NDArray[np.uint16]], *, threshold: float = LIKELY, is_young: bool = False
) -> Separation | None:
    """Divide records, given by their buckets in stream order, in two regimes; None if they are one's, or too few.

    `is_young`: whether their regime is; a part may then be any number of runs.
    """
    distinct = {each.tobytes(): each for each in records}
    if len(distinct) < MIN_TESTED:
        return None
    tokens = _Tokens.of(list(distinct.values()))
    outcomes = [outcome for start_N in _starts(tokens) if (outcome := _best_division(tokens, start_N)) is not None]
    statistic, division_N = max(outcomes, key=lambda outcome: outcome[0], default=(0.0, None))
    if division_N is None or statistic <= threshold:
        return None
    side = dict(zip(distinct, division_N.tolist(), strict=True))
    is_second = np.array([side[each.tobytes()] for each in records])
    number = int(is_second.sum())
    swapped = 2 * number > len(records) or (2 * number == len(records) and is_second[0])
    is_smaller = is_second != swapped
    num_runs = int(is_smaller[0]) + int((is_smaller[1:] & ~is_smaller[:-1]).sum())
    if num_runs < MIN_RUNS and (not is_young or begin_alike(records)):
        return None
    return Separation(statistic, tuple(is_smaller.tolist()))


def distinctness(ones: Sequence[NDArray[np.uint16]], others: Sequence[NDArray[np.uint16]]) -> float:
    """T of eq. (3) for the division of all records into these two parts."""
    tokens = _Tokens.of([*ones, *others])
    division_N = np.arange(len(ones) + len(others)) >= len(ones)
    lead_N = _lead(tokens, division_N)
    return _statistic(tokens, division_N, np.where(division_N, lead_N, -lead_N))


def begin_alike(records: Sequence[NDArray[np.uint16]]) -> bool:
    """Whether the records have the same instruction; some may have lost it, where long inputs are cut."""
    [(_, number)] = Counter(each[:SAME_INSTRUCTION].tobytes() for each in records).most_common(1)
    return number >= (1 - LOW) * len(records)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The records' buckets as one sparse array: T entries of a record, a bucket and a count."""

    record_T: NDArray[np.int64]
    column_T: NDArray[np.int64]
    """Index of the bucket among those that occur."""
    count_T: NDArray[np.float64]
    sizes_N: NDArray[np.float64]
    """The n_i."""
    total_V: NDArray[np.float64]
    """How often each bucket that occurs does."""
    prior_T: NDArray[np.float64]
    """The p_b of each entry's bucket."""
    num_columns: int

    @classmethod
    def of(cls, records: Sequence[NDArray[np.uint16]]) -> "_Tokens":
        record = np.repeat(np.arange(len(records)), [len(each) for each in records])
        keys, found_T = np.unique(record * NUM_BUCKETS + np.concatenate(records), return_counts=True)
        buckets, column_T = np.unique(keys % NUM_BUCKETS, return_inverse=True)
        count_T = found_T.astype(np.float64)
        total_V = _sums(column_T, count_T, len(buckets))
        prior_T = ((total_V / total_V.sum() + 1 / NUM_BUCKETS) / 2)[column_T]
        sizes_N = np.array([len(each) for each in records], dtype=np.float64)
        return cls(keys // NUM_BUCKETS, column_T, count_T, sizes_N, total_V, prior_T, len(buckets))

    def sum_by_record(self, values_T: NDArray[np.float64]) -> NDArray[np.float64]:
        return _sums(self.record_T, values_T, len(self.sizes_N))

    def sum_by_column(self, values_T: NDArray[np.float64]) -> NDArray[np.float64]:
        return _sums(self.column_T, values_T, self.num_columns)


def _sums(index_T: NDArray[np.int64], values_T: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Sums of the values with each index."""
    sums: NDArray[np.float64] = np.bincount(index_T, weights=values_T, minlength=size).astype(np.float64, copy=False)
    return sums


def _starts(tokens: _Tokens) -> list[Division]:
    """Signs of the leading principal components of the tf-idf vectors; term frequencies are 0 or 1."""
    n = len(tokens.sizes_N)
    frequency_V = tokens.sum_by_column(np.ones_like(tokens.count_T)) / n
    weights_NV = np.zeros((n, tokens.num_columns))
    weights_NV[tokens.record_T, tokens.column_T] = np.sqrt(-np.log(frequency_V[tokens.column_T]))
    weights_NV /= np.maximum(np.linalg.norm(weights_NV, axis=1, keepdims=True), 1e-9)
    weights_NV -= weights_NV.mean(axis=0)
    _, vectors_NN = np.linalg.eigh(weights_NV @ weights_NV.T)
    return [vectors_NN[:, -k] > 0 for k in range(1, NUM_STARTS + 1)]


def _best_division(tokens: _Tokens, division_N: Division) -> tuple[float, Division] | None:
    """EM from one start: T and the division; None if a part becomes too small, or none is stable."""
    least = max(MIN_PART, MIN_PART_SHARE * len(division_N))
    for _ in range(MAX_ITERATIONS):
        if not least <= division_N.sum() <= len(division_N) - least:
            return None
        lead_N = _lead(tokens, division_N)
        if ((lead_N > 0) == division_N).all():
            return _statistic(tokens, division_N, np.abs(lead_N)), division_N
        division_N = lead_N > 0
    return None


def _statistic(tokens: _Tokens, division_N: Division, margin_N: NDArray[np.float64]) -> float:
    """T of eq. (3)."""
    per_bucket_N = margin_N / tokens.sizes_N
    by_words = min(np.median(per_bucket_N) / MEDIAN_MARGIN, np.quantile(per_bucket_N, LOW) / LOW_MARGIN)
    by_common = _num_common(tokens, division_N) / NUM_COMMON
    return float(min(np.quantile(margin_N, LOW) / LOW_MARGIN_NATS, max(by_words, by_common)))


def _num_common(tokens: _Tokens, division_N: Division) -> int:
    """The d of eq. (3)."""
    weight_N = np.where(division_N, 1 / division_N.sum(), -1 / (~division_N).sum())
    difference_V = tokens.sum_by_column(weight_N[tokens.record_T])
    return int((np.abs(difference_V) >= COMMON_DIFFERENCE).sum())


def _lead(tokens: _Tokens, division_N: Division) -> NDArray[np.float64]:
    """w_i2 - w_i1 of eq. (1): by how much the second part explains each record better than the first."""
    in_second_T = division_N[tokens.record_T]
    second_V = tokens.sum_by_column(np.where(in_second_T, tokens.count_T, 0.0))
    lead_T = np.zeros_like(tokens.prior_T)
    for direction, counts_V, is_own_T, is_own_N in (
        (1, second_V, in_second_T, division_N),
        (-1, tokens.total_V - second_V, ~in_second_T, ~division_N),
    ):
        counts_T = counts_V[tokens.column_T] - np.where(is_own_T, tokens.count_T, 0.0)
        totals_N = counts_V.sum() - np.where(is_own_N, tokens.sizes_N, 0.0)
        lead_T += direction * (
            np.log(counts_T + SMOOTHING * tokens.prior_T) - np.log(totals_N + SMOOTHING)[tokens.record_T]
        )
    return tokens.sum_by_record(tokens.count_T * lead_T)
