"""Change of the inputs' distribution: a two-sample test on mean embeddings.

    S_n = |m_n - m|^2 / (tr C f_n (1 / n + 1 / N))                                                          (1)
    S_n ~ Gamma(nu / 2, 2 / nu) under no change; alarm when S_n exceeds the quantile of the level           (2)

m_n is the mean phi of the last n records, m that of the N earlier records of the regime; `ReferenceDistribution`
defines tr C, f_n and nu. The Gamma is the Satterthwaite fit to a weighted sum of chi-squares. Two windows are tested:
the short one is quick where regimes lie far apart, the long one separates regimes that lie close together.

    >>> rng = np.random.default_rng(0)
    >>> phi = rng.normal(size=(300, 256)).astype(np.float32)
    >>> phi[200:, 0] += 8.0                                        # planted: from record 200 on
    >>> phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    >>> test, reference = MeanEmbeddingTest(level=1e-8), ReferenceDistribution()
    >>> reference.add_all(phi[:100])
    >>> next(t for t in range(132, 300) if test.test(phi[t - 32 : t], reference)) - 200
    11
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln, gammainccinv, gammaln, stdtrit

from streamlearn.shift.features import COMMON, NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features

# The distribution of a regime's records, and the chance deviation of the mean of n of them.
#
#     m = mean phi,  tr C = 1 - |m|^2  because |phi| = 1                                                      (1)
#     g_k = <phi_t, phi_(t+k)> averaged over t, less |m|^2                                                    (2)
#     f_n = 1 + 2 sum_(0 < k < n) (1 - k / n) g_k / tr C                                                      (3)
#     nu = (tr C)^2 / tr(C^2),  tr(C^2) = <phi_s - m, phi_t - m>^2 averaged over pairs far apart              (4)
#
# The mean of n consecutive records has variance tr C f_n / n, the variance of a mean of a serially dependent series;
# independent records have f_n = 1. A stream that comes in bursts thus raises its own threshold.


# Shape suffixes: D features, L lags, N records of a window.


NUM_LAGS = 32
HALVED_AT = 8192
"""Records at which all sums are halved, so that old records fade."""
_FAR = NUM_LAGS // 2  # pairs at least this far apart count as independent in eq. (4)
_EVERY = 4  # one record in four enters eq. (4), which costs more than all the rest
_PRIOR_PAIRS, _PRIOR_NU = 16.0, 8.0


def _zeros(size: int) -> NDArray[np.float64]:
    return np.zeros(size)


@dataclass(eq=False)
class ReferenceDistribution:
    """The running sums of eq. (1) to (4)."""

    ROW: ClassVar[int] = NUM_FEATURES + 2 * NUM_LAGS + 3
    sum_D: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_FEATURES))
    products_L: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_LAGS))
    pairs_L: NDArray[np.float64] = field(default_factory=lambda: _zeros(NUM_LAGS))
    num_records: float = 0.0
    squares: float = 0.0
    num_squares: float = 0.0

    def copy(self) -> Self:
        """An independent copy."""
        return type(self).from_row(self.to_row())

    @property
    def mean(self) -> NDArray[np.float64]:
        """The m of eq. (1)."""
        return self.sum_D / max(self.num_records, 1.0)

    def add(self, phi_D: NDArray[np.float32], following_ND: NDArray[np.float32]) -> None:
        """Add one record; the records that came right after it serve eq. (2) and (4)."""
        num = min(len(following_ND), NUM_LAGS - 1)
        if num:
            after_ND = following_ND[:num]
            products = after_ND @ phi_D
            self.products_L[1 : num + 1] += products
            self.pairs_L[1 : num + 1] += 1.0
            if num > _FAR and self.num_records >= _FAR and self.num_records % _EVERY == 0:
                m_D = self.mean.astype(np.float32)
                centred = products - phi_D @ m_D - after_ND @ m_D + m_D @ m_D
                self.squares += float((centred[_FAR:] ** 2).sum())
                self.num_squares += num - _FAR
        self.sum_D += phi_D
        self.num_records += 1.0
        if self.num_records >= HALVED_AT:
            self._load_row(self.to_row() / 2)

    def add_all(self, phi_ND: NDArray[np.float32]) -> None:
        """Add consecutive records."""
        for i in range(len(phi_ND)):
            self.add(phi_ND[i], phi_ND[i + 1 :])

    @property
    def spread(self) -> float:
        """The tr C, without the bias of a mean over few records."""
        m_D = self.mean
        return max(1.0 - float(m_D @ m_D), 1e-6) * self.num_records / max(self.num_records - 1.0, 1.0)

    def inflation(self, n: int) -> float:
        """f_n of eq. (3), at least 1; records farther apart than the lags kept count as independent."""
        if self.num_records < NUM_LAGS:
            return 1.0
        m_D, spread = self.mean, self.spread
        lags = np.arange(1, min(n, NUM_LAGS))
        lags = lags[self.pairs_L[lags] > 0]
        covariance = self.products_L[lags] / self.pairs_L[lags] - (float(m_D @ m_D) - spread / self.num_records)
        return max(1.0, 1.0 + 2.0 * float(((1.0 - lags / n) * covariance).sum()) / spread)

    @property
    def freedom(self) -> float:
        """The nu of eq. (4), shrunk towards a prior while the regime has few records."""
        spread = self.spread
        squares = self.squares + _PRIOR_PAIRS * spread**2 / _PRIOR_NU
        return max(spread**2 * (self.num_squares + _PRIOR_PAIRS) / squares, 1.0)

    def merge(self, other: Self) -> None:
        """Add the sums of another regime."""
        self._load_row(self.to_row() + other.to_row())

    def to_row(self) -> NDArray[np.float64]:
        """All sums, as `ROW` numbers."""
        return np.concatenate(
            [self.sum_D, self.products_L, self.pairs_L, [self.num_records, self.squares, self.num_squares]]
        )

    @classmethod
    def from_row(cls, row: NDArray[np.float64]) -> Self:
        """Inverse of `to_row`."""
        made = cls()
        made._load_row(row)
        return made

    def _load_row(self, row: NDArray[np.float64]) -> None:
        self.sum_D, self.products_L, self.pairs_L, rest = (
            part.copy() for part in np.split(row, np.cumsum([NUM_FEATURES, NUM_LAGS, NUM_LAGS]))
        )
        self.num_records, self.squares, self.num_squares = rest.tolist()


# Shape suffixes: D features, N records of a window.


WINDOWS = (16, 32)
MIN_REFERENCE = 16
LOWEST_THRESHOLD = 1.5
"""Every threshold lies above it, because nu is never large enough; a smaller statistic needs no quantile."""


@dataclass(frozen=True)
class Rejection:
    """A statistic that exceeded its threshold, and the number of newest records it was computed from."""

    statistic: float
    threshold: float
    window: int


@dataclass(frozen=True)
class MeanEmbeddingTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test under no change."""
    windows: tuple[int, ...] = WINDOWS
    serial_correlation: bool = True
    """Whether f_n is estimated; otherwise records count as independent."""

    def test(self, window_ND: NDArray[np.float32], reference: ReferenceDistribution) -> Rejection | None:
        """Test the newest records of the window, which come last, against the regime's records before them."""
        for n in self.windows:
            num_records = reference.num_records + len(window_ND) - n
            if len(window_ND) < n or num_records < MIN_REFERENCE or reference.num_records < 2:
                continue
            sum_D = reference.sum_D + np.add.reduce(window_ND[:-n], axis=0)
            mean_D = np.add.reduce(window_ND[-n:], axis=0) / np.float32(n)
            statistic = self._statistic(mean_D, sum_D / num_records, reference, n, num_records)
            if statistic > LOWEST_THRESHOLD and statistic > (threshold := self.threshold(reference)):
                return Rejection(statistic, threshold, n)
        return None

    def distance(self, mean_D: NDArray[np.float32], n: int, reference: ReferenceDistribution) -> float:
        """S_n between the mean of n records and a remembered regime: near 1 if the records are the regime's."""
        return self._statistic(mean_D, reference.mean, reference, n, reference.num_records)

    def threshold(self, reference: ReferenceDistribution) -> float:
        """The quantile of eq. (2)."""
        nu = reference.freedom
        return float(gammainccinv(nu / 2, self.level)) * 2 / nu

    @staticmethod
    def change_point(window_ND: NDArray[np.float32], reference: ReferenceDistribution) -> int:
        """Index in the window at which the new distribution begins: the split with the largest likelihood ratio.

        argmax over s of k |mean(window[s:]) - m|^2 with k = N - s, for spherical noise
        """
        centred_ND = window_ND - reference.mean.astype(np.float32)
        tails_ND = np.cumsum(centred_ND[::-1], axis=0)[::-1]
        sizes = np.arange(len(window_ND), 0, -1)
        return int(((tails_ND**2).sum(axis=1) / sizes).argmax())

    def _statistic(
        self,
        mean_D: NDArray[np.float32],
        m_D: NDArray[np.float64],
        reference: ReferenceDistribution,
        n: int,
        num_records: float,
    ) -> float:
        difference = mean_D - m_D
        variance = reference.spread * (1 / n + 1 / num_records)
        statistic = float(difference @ difference) / variance
        if statistic > LOWEST_THRESHOLD and self.serial_correlation:  # f_n costs more than the rest and is at least 1
            statistic /= reference.inflation(n)
        return statistic


# Change of one token's frequency: a rare token is now in most records, or a common one in hardly any.
#
#     P(j of n | k of N) = C(n, j) B(k + j + 1/2, N - k + n - j + 1/2) / B(k + 1/2, N - k + 1/2)              (1)
#
# k of the segment's N records before the window have the token, and j of the n records in it. Eq. (1) is the
# beta-binomial probability of that under an unchanged frequency (Jeffreys prior). Alarm when -log P of one token
# exceeds
# that of the level, divided among all tokens, by the factor `CAUTION`: consecutive records on one topic share tokens.
# Regimes that differ in a single token ("is there a", "is there not a") hardly differ in their mean embeddings or in
# the fit of their records; only this test separates them.
#
#     >>> from streamlearn.shift.document_frequency import count_records
#     >>> rng = np.random.default_rng(0)
#     >>> records = [rng.integers(0, 99, size=12) for _ in range(200)]
#     >>> records[150:] = [np.append(each, 99) if i % 5 else each for i, each in enumerate(records[150:])]    # planted
#     >>> test, before = TokenPresenceTest(level=1e-8), DocumentFrequency()
#     >>> for each in records[:118]:
#     ...     before = before.after(each)
#     >>> next(t for t in range(150, 200) if test.test(count_records(records[t - 32 : t]), 32, before)) - 150
#     27


# Shape suffixes: B buckets, C candidates.


WINDOW = 32
MIN_BEFORE = 64
"""Records of the segment before the window without which nothing is tested."""
RARE = 0.05
"""A token is rare where at most this share of the records have it. Only changes between rare and common are tested."""
CAUTION = 1.5
"""Bursts of records of similar length reach 1.1 (SuperNI's 15 tasks, level 1e-8)."""


@dataclass(frozen=True)
class TokenChange:
    """A token that appeared or disappeared."""

    bucket: int
    appeared: bool
    statistic: float
    """-log P of eq. (1), nats."""
    threshold: float


@dataclass(frozen=True)
class TokenPresenceTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test of independent records under no change."""

    def test(self, window_B: NDArray[np.float32], n: int, before: DocumentFrequency) -> TokenChange | None:
        """Test a window of n records, `window_B` of which have each token, against the segment before it."""
        if n < WINDOW or before.num_records < MIN_BEFORE:
            return None
        k_B, total = before.records_B, before.num_records
        appeared_B = (window_B >= COMMON * n) & (k_B <= RARE * total)
        disappeared_B = (window_B <= RARE * n) & (k_B >= COMMON * total)
        bucket_C = np.flatnonzero(appeared_B | disappeared_B)
        if not len(bucket_C):
            return None
        j_C, k_C = window_B[bucket_C].astype(np.float64), k_B[bucket_C].astype(np.float64)
        ways_C = gammaln(n + 1) - gammaln(j_C + 1) - gammaln(n - j_C + 1)
        log_p_C = ways_C + betaln(k_C + j_C + 0.5, total - k_C + n - j_C + 0.5) - betaln(k_C + 0.5, total - k_C + 0.5)
        least = int(log_p_C.argmin())
        statistic, threshold = -float(log_p_C[least]), CAUTION * math.log(NUM_BUCKETS / self.level)
        bucket = int(bucket_C[least])
        return TokenChange(bucket, bool(appeared_B[bucket]), statistic, threshold) if statistic > threshold else None

    @staticmethod
    def change_point(records: Sequence[NDArray[np.uint16]], change: TokenChange) -> int:
        """Index of the record at which the token appeared or disappeared.

        The split after which most records agree with the change, less those that do not.
        """
        agrees = np.array([(change.bucket in buckets) == change.appeared for buckets in records])
        return int(np.cumsum((agrees - 0.5)[::-1])[::-1].argmax())


# Drop of the records' fit to the segment's regime: a t-test on their tokens.
#
#     T_n = (mean of the last n fits - m) / (s sqrt(f (1 / n + 1 / N))),  f = (1 + rho) / (1 - rho)           (1)
#
# A record's fit is its log ratio per bucket under the regime (`naive_bayes`, eq. 2). m, s and rho are mean, deviation
# and lag-1 correlation of the N fits of the segment before the window. Alarm when T_n falls below the Student
# quantile of
# the level. This test separates short inputs whose mean embeddings hardly differ, which `MeanEmbeddingTest` misses.
#
#     >>> rng = np.random.default_rng(0)
#     >>> fits = rng.normal(0.2, 0.1, size=300)
#     >>> fits[200:] -= 0.25                                         # planted: from record 200 on
#     >>> test, before = FitDropTest(level=1e-8), RunningStats()
#     >>> for fit in fits[:100]:
#     ...     before = before.after(fit)
#     >>> next(t for t in range(132, 300) if test.test(fits[t - 32 : t], before)) - 200
#     11


MIN_FITS = 24
"""Fits before the window without which nothing is tested and no fit counts as an outlier."""
FIT_DROP_TEST_HALVED_AT = 1024.0
"""Fits at which the sums are halved, so that old records fade."""
MIN_STATISTIC = 4.0
"""A smaller statistic never raises an alarm; the quantile of the default level is larger anyway (4.9)."""
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
        keep = 0.5 if self.number >= FIT_DROP_TEST_HALVED_AT else 1.0
        return RunningStats(
            keep * self.number + 1.0,
            keep * self.sum + fit,
            keep * self.squares + fit**2,
            keep * self.products + fit * (self.last if self.number else fit),
            fit,
        )

    @property
    def mean(self) -> float:
        """The m of eq. (1)."""
        return self.sum / self.number

    @property
    def deviation(self) -> float:
        """The s of eq. (1)."""
        return float(max(self.squares / self.number - self.mean**2, 1e-6) ** 0.5)

    @property
    def inflation(self) -> float:
        """The f of eq. (1), at least 1."""
        rho = (self.products / self.number - self.mean**2) / self.deviation**2
        rho = min(max(rho, 0.0), 0.9)
        return (1 + rho) / (1 - rho)


@dataclass(frozen=True)
class FitDropTest:
    """The stateless test."""

    level: float
    """Probability of an alarm in one test under no change."""
    windows: tuple[int, ...] = WINDOWS

    def test(self, fits: NDArray[np.float64] | Sequence[float], before: RunningStats) -> Rejection | None:
        """Test the newest fits of the window, which come last, against the segment before the window."""
        if before.number < MIN_FITS:
            return None
        for n in self.windows:
            if len(fits) < n:
                continue
            drop = before.mean - sum(fits[-n:]) / n
            error = before.deviation * (before.inflation * (1 / n + 1 / before.number)) ** 0.5
            if drop > MIN_STATISTIC * error and drop > error * (
                threshold := -float(stdtrit(before.number - 1, self.level))
            ):
                return Rejection(drop / error, threshold, n)
        return None

    @staticmethod
    def change_point(fits: Sequence[float], before: RunningStats) -> int:
        """Index in the window at which the fits drop: the split with the largest likelihood ratio."""
        drops = np.cumsum((before.mean - np.array(fits))[::-1])[::-1]
        sizes = np.arange(len(fits), 0, -1)
        return int((np.maximum(drops, 0.0) ** 2 / sizes).argmax())


# Absence of the segment's regime: a CUSUM over which records are its own.
#
#     c <- max(0, c + log((1 - q) / (1 - p)))  for a record of the segment's regime                           (1)
#     c <- c + log(q / p)                      for a record of another regime                                 (2)
#
# Page 1954. p is the recent share of other regimes' records, an exponential moving average; q = 0.97 is the share
# that is
# expected once the regime is gone. Alarm when c exceeds -log(level). Interleaved known regimes raise p and no alarm.
#
#     >>> test = AbsenceTest(level=1e-6)
#     >>> for ordinal in range(1, 201):
#     ...     test.update(ordinal, own=ordinal % 2 == 0 and ordinal < 150)    # planted: from record 150 on
#     ...     if test.drift_detected:
#     ...         print(ordinal, test.state.run_start)
#     ...         break
#     193 149


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


# Shape suffixes: D features, N records.


@dataclass(frozen=True, eq=False)
class RecentRecord:
    """A record with the slot of its regime."""

    features: Features
    ordinal: int
    slot: int
    log_ratio: float
    """Under the slot's regime when the record arrived, nats (`naive_bayes`, eq. 2)."""

    @property
    def fit(self) -> float:
        """The log ratio per bucket."""
        return self.log_ratio / len(self.features.buckets)


def stack_phi(records: Iterable[RecentRecord]) -> NDArray[np.float32]:
    """The phi of each record as one array."""
    phi = [each.features.phi_D for each in records]
    return np.array(phi, dtype=np.float32).reshape(len(phi), NUM_FEATURES)


@dataclass(frozen=True)
class Alarm:
    """Grounds for a shift. `SegmentClassifier` decides what the records are."""

    statistic: float
    threshold: float
    records: tuple[RecentRecord, ...]
    """The records from the estimated change point on."""
    token_change: TokenChange | None = None
    """The token that appeared or disappeared. The records left the segment's regime then, however well they fit it."""


def to_arrays(name: str, rows: Sequence[NDArray[np.uint16]]) -> dict[str, NDArray[np.generic]]:
    """The concatenated rows, as int32 because every snapshot reader supports it, and the length of each row."""
    return {
        f"{name}.sizes": np.array([len(row) for row in rows], dtype=np.int64),
        f"{name}.values": np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32),
    }


def from_arrays(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.uint16]]:
    """Inverse of `to_arrays`."""
    ends = np.cumsum(arrays[f"{name}.sizes"].astype(np.int64))
    return [row.copy() for row in np.split(arrays[f"{name}.values"].astype(np.uint16), ends)[: len(ends)]]
