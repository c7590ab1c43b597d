"""The tests that may end a segment: each compares the newest records with the segment before them.

mean_embedding_test   the distribution of the inputs changed
fit_drop_test         the tokens fit the regime worse: separates short inputs, which the first test misses
token_presence_test   one token appeared or disappeared, which the other two miss
absence_test          the segment's regime is gone, and only records of other known regimes arrive
borrowed_test         records that were given to another known regime are not that regime's

To add a test, write a function like these and list it in `WINDOW_TESTS` or `OTHER_TESTS`. The budget of false alarms is
divided by the number of tests listed, so each gets its share as its level: the probability of an alarm at one record
of a stream that does not change. A test that needs a statistic of the whole segment adds a field to `Window`.
"""
# Shape suffixes: B buckets, C candidates, D features, N records of a window.

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, gammaln, stdtrit

from streamlearn.shift.features import COMMON, NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features
from streamlearn.shift.reference import WINDOWS, Reference

SIZE = max(WINDOWS)
"""Records in a segment's window."""


@dataclass(frozen=True, eq=False)
class RecentRecord:
    """A record with the slot of its regime."""

    features: Features
    ordinal: int
    slot: int
    log_ratio: float
    """Under the slot's regime when the record arrived, nats (`memory`, eq. 3)."""

    @property
    def fit(self) -> float:
        """The log ratio per bucket."""
        return self.log_ratio / len(self.features.buckets)


@dataclass(frozen=True)
class TokenChange:
    """A token that appeared or disappeared."""

    bucket: int
    appeared: bool


@dataclass(frozen=True, eq=False)
class Alarm:
    """Evidence for a shift. `detector` decides what the records are."""

    statistic: float
    threshold: float
    records: tuple[RecentRecord, ...]
    """The records from the estimated change point on."""
    token_change: TokenChange | None = None
    """Set if a token changed. The records left the segment's regime then, however well they fit it."""


def stack_x(records: Iterable[RecentRecord]) -> NDArray[np.float32]:
    """The x of each record as one array."""
    x = [record.features.x_D for record in records]
    return np.array(x, dtype=np.float32).reshape(len(x), NUM_FEATURES)


MIN_FITS = 24
"""Fits before the window below which nothing is tested and no fit counts as an outlier."""
FITS_HALVED_AT = 1024.0
"""Fits at which the sums are halved, so that old records fade."""
_OUTLIER = 5.0


@dataclass(frozen=True)
class RunningStats:
    """Running sums over the fits of a segment; outliers are clipped at `_OUTLIER` deviations."""

    number: float = 0.0
    sum: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last: float = 0.0

    def after(self, fit: float) -> "RunningStats":
        """Return the sums with one more fit."""
        if self.number >= MIN_FITS:
            bound = _OUTLIER * self.deviation
            fit = min(max(fit, self.mean - bound), self.mean + bound)
        keep = 0.5 if self.number >= FITS_HALVED_AT else 1.0
        return RunningStats(
            keep * self.number + 1.0,
            keep * self.sum + fit,
            keep * self.squares + fit**2,
            keep * self.products + fit * (self.last if self.number else fit),
            fit,
        )

    @property
    def mean(self) -> float:
        return self.sum / self.number

    @property
    def deviation(self) -> float:
        return float(max(self.squares / self.number - self.mean**2, 1e-6) ** 0.5)

    @property
    def inflation(self) -> float:
        """The f of eq. (7), at least 1."""
        rho = (self.products / self.number - self.mean**2) / self.deviation**2
        rho = min(max(rho, 0.0), 0.9)
        return (1 + rho) / (1 - rho)


@dataclass(frozen=True, eq=False)
class Window:
    """The newest records of the segment's regime, and statistics of the segment's records before them."""

    records: tuple[RecentRecord, ...] = ()
    fits_before: RunningStats = field(default_factory=RunningStats)
    tokens_before: DocumentFrequency = field(default_factory=DocumentFrequency)

    @cached_property
    def x_ND(self) -> NDArray[np.float32]:  # noqa: N802  shape suffix
        """The x of the records."""
        return stack_x(self.records)

    @cached_property
    def fits(self) -> list[float]:
        """The fit of each record."""
        return [record.fit for record in self.records]

    @cached_property
    def token_records_B(self) -> NDArray[np.float32]:  # noqa: N802  shape suffix
        """Number of records with each token."""
        counts_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
        for record in self.records:
            counts_B[record.features.buckets] += np.float32(1.0)  # a repeated index counts once
        return counts_B


LOWEST_THRESHOLD = 1.5
"""Every threshold of eq. (6) lies above it, because nu is never large enough; a smaller statistic needs no quantile."""
MIN_REFERENCE = 16


def mean_embedding_test(window: Window, reference: Reference, level: float, *, n: int) -> Alarm | None:
    """Test whether the distribution of the inputs changed: a two-sample test on mean embeddings.

        S_n = |m_n - m|^2 / (tr C (1 / n + 1 / N))                                                          (5)
        S_n / f ~ Gamma(nu_S / 2, 2 / nu_S) under no change; alarm if S_n exceeds the level's quantile       (6)

    m_n is the mean x of the last n records, m that of the N earlier records of the regime. The Gamma is the
    Satterthwaite fit to a weighted sum of chi-squares.

        >>> from streamlearn.shift.reference import IDENTITY, ReferenceDistribution, pooled_metric
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(300, 128)).astype(np.float32)
        >>> x[200:, 0] += 6.0                                          # planted: from record 200 on
        >>> x /= np.linalg.norm(x, axis=1, keepdims=True)
        >>> token = np.zeros(1, np.uint16)
        >>> records = [RecentRecord(Features(x_D, token, 0.0), i, 0, 0.0) for i, x_D in enumerate(x)]
        >>> distribution = ReferenceDistribution()
        >>> for t in range(100):
        ...     distribution = distribution.after(x[t], IDENTITY)
        >>> reference = Reference(distribution, pooled_metric([distribution]))
        >>> windows = {t: Window(tuple(records[t - 32 : t])) for t in range(132, 300)}
        >>> next(t for t in windows if mean_embedding_test(windows[t], reference, 1e-8, n=16)) - 200
        8
    """
    window_ND = window.x_ND
    if len(window_ND) < n or reference.num_records < 2 or reference.num_records + len(window_ND) - n < MIN_REFERENCE:
        return None
    statistic = reference.statistic(window_ND[-n:].mean(axis=0), n, window_ND[:-n])
    if statistic <= LOWEST_THRESHOLD or statistic <= (threshold := reference.threshold(level, n)):
        return None
    return Alarm(statistic, threshold, window.records[change_point(window_ND, reference) :])


def change_point(x_ND: NDArray[np.float32], reference: Reference) -> int:
    """The split s with the largest likelihood ratio: the argmax of k |mean(x[s:]) - m|^2, k = N - s."""
    tails_ND = np.cumsum((x_ND - reference.distribution.mean)[::-1], axis=0)[::-1]
    sizes = np.arange(len(x_ND), 0, -1)
    return int((np.einsum("nd,nd->n", tails_ND @ reference.metric, tails_ND) / sizes).argmax())


MIN_STATISTIC = 4.0
"""A smaller T_n never raises an alarm; the quantile of the default level is larger anyway (4.9)."""


def fit_drop_test(window: Window, _: Reference, level: float, *, n: int) -> Alarm | None:
    """Test whether the records' fit to the segment's regime dropped: a t-test on their tokens.

        T_n = (m - mean of the last n fits) / (s sqrt(f (1 / n + 1 / N))),  f = (1 + rho) / (1 - rho)       (7)

    A record's fit is its log ratio per bucket under the regime (`memory`, eq. 3). m, s and rho are mean, deviation and
    lag-1 correlation of the N fits of the segment before the window. Alarm if T_n exceeds the Student quantile.

        >>> from streamlearn.shift.reference import IDENTITY, ReferenceDistribution
        >>> rng = np.random.default_rng(0)
        >>> fits = rng.normal(0.2, 0.1, size=300)
        >>> fits[200:] -= 0.25                                         # planted: from record 200 on
        >>> features = Features(np.zeros(128, np.float32), np.zeros(1, np.uint16), 0.0)
        >>> records = [RecentRecord(features, i, 0, float(fit)) for i, fit in enumerate(fits)]
        >>> before, unused = RunningStats(), Reference(ReferenceDistribution(), IDENTITY)
        >>> for fit in fits[:100]:
        ...     before = before.after(fit)
        >>> windows = {t: Window(tuple(records[t - 32 : t]), before) for t in range(132, 300)}
        >>> next(t for t in windows if fit_drop_test(windows[t], unused, 1e-8, n=16)) - 200
        11
    """
    fits, before = window.fits, window.fits_before
    if before.number < MIN_FITS or len(fits) < n:
        return None
    drop = before.mean - sum(fits[-n:]) / n
    error = before.deviation * (before.inflation * (1 / n + 1 / before.number)) ** 0.5
    if drop <= MIN_STATISTIC * error or drop <= error * (threshold := -float(stdtrit(before.number - 1, level))):
        return None
    drops = np.cumsum((before.mean - np.array(fits))[::-1])[::-1]
    sizes = np.arange(len(fits), 0, -1)
    start = int((np.maximum(drops, 0.0) ** 2 / sizes).argmax())  # the split with the largest likelihood ratio
    return Alarm(drop / error, threshold, window.records[start:])


MIN_BEFORE = 64
"""Records of the segment before the window below which no token is tested."""
RARE = 0.05
"""A token is rare if at most this share of the records have it. Only changes between rare and common are tested."""
CAUTION = 1.5
"""Bursts of records of similar length reach 1.1 (SuperNI's 15 tasks, level 1e-8)."""


def token_presence_test(window: Window, reference: Reference, level: float) -> Alarm | None:
    """Test whether a rare token is now in most records, or a common one in hardly any.

        P(j of n | k of N) = C(n, j) B(k + j + 1/2, N - k + n - j + 1/2) / B(k + 1/2, N - k + 1/2)          (8)

    k of the segment's N records before the window have the token, and j of the n records in it. Eq. (8) is the
    beta-binomial probability of that under an unchanged frequency (Jeffreys prior). Alarm if -log P of one token
    exceeds that of the level, divided among all tokens, by the factor `CAUTION`, and by as much as serial
    dependence raises the threshold of eq. (6): consecutive records on one topic share tokens. Regimes that differ in a
    single token ("is there a", "is there not a") hardly differ in their mean embeddings or in the fit of their records;
    only this test separates them.

        >>> from streamlearn.shift.reference import IDENTITY, ReferenceDistribution
        >>> rng = np.random.default_rng(0)
        >>> tokens = [rng.integers(0, 99, size=12) for _ in range(200)]
        >>> tokens[150:] = [np.append(ids, 99) if i % 5 else ids for i, ids in enumerate(tokens[150:])]    # planted
        >>> zeros, before = np.zeros(128, np.float32), DocumentFrequency()
        >>> unused = Reference(ReferenceDistribution(), IDENTITY)
        >>> records = [RecentRecord(Features(zeros, ids, 0.0), i, 0, 0.0) for i, ids in enumerate(tokens)]
        >>> for ids in tokens[:118]:
        ...     before = before.after(ids)
        >>> windows = {t: Window(tuple(records[t - 32 : t]), tokens_before=before) for t in range(150, 200)}
        >>> next(t for t in windows if token_presence_test(windows[t], unused, 1e-8)) - 150
        27
    """
    n, k_B, total = len(window.records), window.tokens_before.records_B, window.tokens_before.num_records
    if n < SIZE or total < MIN_BEFORE:
        return None
    window_B = window.token_records_B
    appeared_B = (window_B >= COMMON * n) & (k_B <= RARE * total)
    disappeared_B = (window_B <= RARE * n) & (k_B >= COMMON * total)
    bucket_C = np.flatnonzero(appeared_B | disappeared_B)
    if not len(bucket_C):
        return None
    j_C, k_C = window_B[bucket_C].astype(np.float64), k_B[bucket_C].astype(np.float64)
    ways_C = gammaln(n + 1) - gammaln(j_C + 1) - gammaln(n - j_C + 1)
    log_p_C = ways_C + betaln(k_C + j_C + 0.5, total - k_C + n - j_C + 0.5) - betaln(k_C + 0.5, total - k_C + 0.5)
    least = int(log_p_C.argmin())
    statistic, threshold = -float(log_p_C[least]), CAUTION * reference.excess(level, n) * math.log(NUM_BUCKETS / level)
    if statistic <= threshold:
        return None
    change = TokenChange(int(bucket_C[least]), bool(appeared_B[bucket_C[least]]))
    # The change point is the split after which most records agree with the change, less those that do not.
    agrees = np.array([(change.bucket in record.features.buckets) == change.appeared for record in window.records])
    start = int(np.cumsum((agrees - 0.5)[::-1])[::-1].argmax())
    return Alarm(statistic, threshold, window.records[start:], change)


ABSENT_SHARE = 0.97
"""The q of eq. (9) and (10)."""
ABSENCE_EMA_RECORDS = 32
"""Time constant of p, in records."""
MIN_SHARE, MAX_SHARE = 0.03, 0.95
"""Bounds of p, so that no single record decides."""


@dataclass(frozen=True)
class Absence:
    """A CUSUM over which records belong to the segment's regime.

        c <- max(0, c + log((1 - q) / (1 - p)))  for a record of the segment's regime                       (9)
        c <- c + log(q / p)                      for a record of another regime                            (10)

    Page 1954. p is the recent share of other regimes' records, an exponential moving average; q = 0.97 is the share
    that is expected once the regime is gone. Interleaved known regimes raise p and no alarm.

        >>> absence = Absence()
        >>> for ordinal in range(1, 201):
        ...     absence = absence.after(ordinal, own=ordinal % 2 == 0 and ordinal < 150)  # planted: from record 150 on
        ...     if absence.statistic > -math.log(1e-6):
        ...         print(ordinal, absence.run_start)
        ...         break
        193 149
    """

    share: float = 0.0
    """The p before its bounds are applied."""
    statistic: float = 0.0
    """The c of eq. (9) and (10)."""
    run_start: int = 0
    """Ordinal of the record at which the statistic last left 0."""

    def after(self, ordinal: int, *, own: bool) -> "Absence":
        """Return the state after the next record, of the segment's regime (`own`) or of another."""
        p = min(max(self.share, MIN_SHARE), MAX_SHARE)
        if own:
            statistic = max(0.0, self.statistic + math.log((1 - ABSENT_SHARE) / (1 - p)))
            return Absence(self.share * (1 - 1 / ABSENCE_EMA_RECORDS), statistic, self.run_start)
        share = self.share + (1 - self.share) / ABSENCE_EMA_RECORDS
        run_start = ordinal if self.statistic == 0.0 else self.run_start
        return Absence(share, self.statistic + math.log(ABSENT_SHARE / p), run_start)

    def restarted(self, records: Iterable[RecentRecord], now: int) -> "Absence":
        """Return the state for a new segment with these records; `now` is the ordinal of the newest record."""
        recent = sum(record.ordinal > now - ABSENCE_EMA_RECORDS for record in records)
        return replace(self, share=1 - min(recent / ABSENCE_EMA_RECORDS, 1.0), statistic=0.0)


MIN_RUN = 12
"""Records of one regime that take the segment's place: fewer do not show whether they are that regime's."""


def absence_test(absence: Absence, others: Sequence[RecentRecord], _: Reference, level: float) -> Alarm | None:
    """Test whether the segment's regime is gone: alarm if c exceeds -log(level).

    The alarm has the records of the regime that is most frequent among the `others` since c left 0.
    """
    threshold = -math.log(level)
    if absence.statistic <= threshold:
        return None
    run = [record for record in others if record.ordinal >= absence.run_start]
    [(slot, number)] = Counter(record.slot for record in run).most_common(1)
    if number < MIN_RUN:
        return None
    return Alarm(absence.statistic, threshold, tuple(record for record in run if record.slot == slot))


BORROWED = (8, 16)
"""Records compared by `borrowed_test`."""


def borrowed_test(
    _: Absence, others: Sequence[RecentRecord], reference: Reference, level: float, *, n: int
) -> Alarm | None:
    """Test whether records that were given to another known regime one by one are that regime's together: eq. (5).

    One record of a new task may well resemble a regime; the mean of several does not.

        >>> from streamlearn.shift.reference import IDENTITY, ReferenceDistribution, pooled_metric
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(300, 128)).astype(np.float32)
        >>> x[200:, 0] += 6.0                                          # planted: another task's, from record 200 on
        >>> x /= np.linalg.norm(x, axis=1, keepdims=True)
        >>> token = np.zeros(1, np.uint16)
        >>> others = [RecentRecord(Features(x_D, token, 0.0), i, 1, 0.0) for i, x_D in enumerate(x)]
        >>> distribution = ReferenceDistribution()
        >>> for t in range(150):
        ...     distribution = distribution.after(x[t], IDENTITY)
        >>> reference = Reference(distribution, pooled_metric([distribution]))
        >>> newest = {t: others[t - 32 : t] for t in range(182, 300)}
        >>> next(t for t in newest if borrowed_test(Absence(), newest[t], reference, 1e-8, n=8)) - 200
        6
    """
    own = [record for record in others if record.slot == others[-1].slot]
    if len(own) < n or reference.num_records < MIN_REFERENCE:
        return None
    x_ND = stack_x(own)
    statistic = reference.statistic(x_ND[-n:].mean(axis=0), n)
    if statistic <= LOWEST_THRESHOLD or statistic <= (threshold := reference.threshold(level, n)):
        return None
    return Alarm(statistic, threshold, tuple(own[min(change_point(x_ND, reference), len(own) - n) :]))


WindowTest = Callable[[Window, Reference, float], Alarm | None]
"""A test of the segment's own records: their window, the regime's earlier records, and the level."""
WINDOW_TESTS: tuple[WindowTest, ...] = (
    token_presence_test,  # first: an alarm of another may come to nothing, and ends the turn of those after it
    *(partial(mean_embedding_test, n=n) for n in WINDOWS),
    *(partial(fit_drop_test, n=n) for n in WINDOWS),
)
"""In order: the first that exceeds its threshold raises the alarm."""
OtherTest = Callable[[Absence, Sequence[RecentRecord], Reference, float], Alarm | None]
"""A test that runs when a record of another regime arrives: that regime's earlier records are its third argument."""
OTHER_TESTS: tuple[OtherTest, ...] = (absence_test, *(partial(borrowed_test, n=n) for n in BORROWED))
