"""Each test follows its equation. `tests/contracts/test_detectors.py` holds all of them to their level and delay."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import betabinom, gamma
from scipy.stats import t as student

from streamlearn.codec import from_arrays, to_arrays
from streamlearn.shift.change_tests import (
    LOWEST_THRESHOLD,
    Absence,
    Alarm,
    RecentRecord,
    RunningStats,
    Window,
    absence_test,
    borrowed_test,
    fit_drop_test,
    mean_embedding_test,
    token_presence_test,
)
from streamlearn.shift.features import NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features
from streamlearn.shift.reference import (
    BLOCK,
    IDENTITY,
    WINDOWS,
    Metric,
    Reference,
    ReferenceDistribution,
    pooled_metric,
)

LEVEL = 1e-7
NOTHING = Reference(ReferenceDistribution(), IDENTITY)


def window_of(
    x_ND: NDArray[np.float32] | None = None,
    fits: Sequence[float] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
) -> Window:
    """A window of records with these x, fits or tokens."""
    number = next(len(column) for column in (x_ND, fits, tokens) if column is not None)
    x_ND = np.zeros((number, NUM_FEATURES), dtype=np.float32) if x_ND is None else x_ND
    buckets = [np.array(ids, dtype=np.uint16) for ids in tokens or [[0]] * number]
    features = [Features(x_D, ids, 0.0) for x_D, ids in zip(x_ND, buckets, strict=True)]
    pairs = zip(features, [0.0] * number if fits is None else fits, strict=True)
    return Window(tuple(RecentRecord(each, i, 0, fit * len(each.buckets)) for i, (each, fit) in enumerate(pairs)))


def unit_vectors(number: int, *, repeated: int = 1, seed: int = 0, offset: float = 10.0) -> NDArray[np.float32]:
    """Random directions, each `repeated` times in a row."""
    x_ND = np.random.default_rng(seed).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    x_ND[:, 0] += offset
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    return x_ND.repeat(repeated, axis=0)


def distribution_of(x_ND: NDArray[np.float32], metric: Metric = IDENTITY) -> ReferenceDistribution:
    distribution = ReferenceDistribution()
    for x_D in x_ND:
        distribution = distribution.after(x_D, metric)
    return distribution


def reference_of(x_ND: NDArray[np.float32], metric: Metric = IDENTITY) -> Reference:
    return Reference(distribution_of(x_ND, metric), metric)


def skewed(number: int, seed: int = 0) -> NDArray[np.float32]:
    """Vectors whose deviations differ by a factor of ten between directions."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(number, NUM_FEATURES)) * np.geomspace(0.03, 0.3, NUM_FEATURES)).astype(np.float32)


def covariance_under(metric: Metric, x_ND: NDArray[np.float32]) -> NDArray[np.float64]:
    """The covariance of W^(1/2) x, relative to its mean variance."""
    covariance_DD = np.cov((x_ND @ np.linalg.cholesky(metric.astype(np.float64))).T)
    relative_DD: NDArray[np.float64] = covariance_DD / np.trace(covariance_DD) * NUM_FEATURES
    return relative_DD


def test_the_metric_of_many_records_whitens() -> None:
    """Eq. (1), with the covariance within the regimes: where their means lie does not matter."""
    one, other = skewed(4000), skewed(4000, seed=1) + 2 * np.eye(NUM_FEATURES, dtype=np.float32)[0]
    metric = pooled_metric([distribution_of(one), distribution_of(other)])
    variances = np.linalg.eigvalsh(covariance_under(metric, skewed(8000, seed=2)))
    before = np.linalg.eigvalsh(covariance_under(IDENTITY, skewed(8000, seed=2)))
    assert 0.5 < variances[0] < variances[-1] < 1.5
    assert before[-1] / before[0] > 50


def test_the_metric_of_few_records_is_the_identity() -> None:
    """None or one has no covariance; that of ten is shrunk."""
    for x_ND in (skewed(0), skewed(1)):
        assert np.array_equal(pooled_metric([distribution_of(x_ND)]), IDENTITY)
    assert np.array_equal(pooled_metric([]), IDENTITY)
    weights = np.linalg.eigvalsh(pooled_metric([distribution_of(skewed(10))]))
    assert 0.1 < weights[0] < weights[-1] < 2.0


def test_mean_and_spread_are_equation_2() -> None:
    """Spread is the trace of the unbiased covariance under the metric."""
    x_ND = skewed(200)
    metric = pooled_metric([distribution_of(skewed(500, seed=1))])
    reference = reference_of(x_ND, metric)
    np.testing.assert_allclose(reference.distribution.mean, x_ND.mean(axis=0), atol=1e-6)
    assert reference.spread == pytest.approx(np.trace(metric @ np.cov(x_ND.T)), rel=1e-4)
    assert reference_of(x_ND).spread == pytest.approx(np.trace(np.cov(x_ND.T)), rel=1e-4)


@pytest.mark.parametrize("n", WINDOWS)
def test_records_in_runs_raise_the_threshold(n: int) -> None:
    """Independent records have about the threshold of f = 1 and nu_S = nu; runs of eight, eq. (3) of their blocks."""
    independent, runs = reference_of(unit_vectors(2000)), reference_of(unit_vectors(250, repeated=8))
    nu = independent.freedom
    assert independent.threshold(LEVEL, n) == pytest.approx(gamma.isf(LEVEL, nu / 2, scale=2 / nu), rel=0.1)
    assert inflation(independent, n) == pytest.approx(1.0, abs=0.05)
    assert inflation(runs, n) == pytest.approx(8.0, rel=0.25)  # means of n deviate like those of n / 8 records
    assert runs.threshold(LEVEL, n) > 6 * independent.threshold(LEVEL, n)


def inflation(reference: Reference, n: int) -> float:
    """The mean S of the blocks, f of eq. (3)."""
    number, total, _ = reference.distribution.moments_W3[WINDOWS.index(n)]
    return float(total / number)


def test_blocks_follow_equation_3() -> None:
    """Each block of n records is compared with all before it, of which there are at least n."""
    x_ND = skewed(5 * BLOCK + 3)
    distribution = ReferenceDistribution()
    expected_W3 = np.zeros((len(WINDOWS), 3))
    for end, x_D in enumerate(x_ND, start=1):
        distribution = distribution.after(x_D, IDENTITY)
        for row, n in enumerate(WINDOWS):
            before = end - n
            if end % BLOCK == 0 and before >= n:
                difference_D = x_ND[before:end].mean(axis=0) - x_ND[:before].mean(axis=0)
                spread = np.trace(np.cov(x_ND[:end].T))
                statistic = difference_D @ difference_D / (spread * (1 / n + 1 / before))
                expected_W3[row] += 1, statistic, statistic**2
    assert expected_W3[:, 0].tolist() == [4, 2]
    np.testing.assert_allclose(distribution.moments_W3, expected_W3, rtol=1e-3)


def test_blocks_continue_after_a_restart() -> None:
    """The sums survive a file bit for bit, in the midst of a block."""
    x_ND, cut = skewed(6 * BLOCK), 2 * BLOCK + 5
    restored = from_arrays(ReferenceDistribution, to_arrays(distribution_of(x_ND[:cut])))
    for x_D in x_ND[cut:]:
        restored = restored.after(x_D, IDENTITY)
    whole, again = (to_arrays(sums) for sums in (distribution_of(x_ND), restored))
    assert whole.keys() == again.keys()
    assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_merging_adds_the_sums_and_begins_a_block() -> None:
    """The records of both are no consecutive ones."""
    one, other = distribution_of(skewed(2 * BLOCK + 5)), distribution_of(skewed(4 * BLOCK + 7, seed=1))
    merged = one.merged(other)
    x_ND = np.concatenate([skewed(2 * BLOCK + 5), skewed(4 * BLOCK + 7, seed=1)])
    np.testing.assert_allclose(merged.scatter, distribution_of(x_ND).scatter, atol=1e-3)
    assert merged.num_records == len(x_ND)
    assert merged.block_sizes == (0, 0)
    assert not merged.block_2D.any()
    assert np.array_equal(merged.moments_W3, one.moments_W3 + other.moments_W3)


def planted(number: int, at: int, size: float = 8.0) -> NDArray[np.float32]:
    """Unit vectors, one coordinate of which moves at record `at`."""
    x_ND = np.random.default_rng(0).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    x_ND[at:, 0] += size
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    return x_ND


def test_the_embedding_statistic_is_equation_5() -> None:
    """The older part of the window counts to the regime before it, and the metric weighs directions."""
    x_ND = planted(132, at=116, size=6.0)
    metric = pooled_metric([distribution_of(x_ND[:100])])
    reference = reference_of(x_ND[:100], metric)
    alarm = mean_embedding_test(window_of(x_ND[100:]), reference, 1e-3, n=16)
    assert alarm is not None
    difference_D = x_ND[116:].mean(axis=0) - x_ND[:116].mean(axis=0)
    chance = reference.spread * (1 / 16 + 1 / 116)
    assert alarm.statistic == pytest.approx(float(difference_D @ metric @ difference_D) / chance, rel=1e-4)
    assert alarm.threshold == reference.threshold(1e-3, 16)


@pytest.mark.parametrize("level", [1e-3, 1e-7])
def test_the_embedding_threshold_is_equation_6(level: float) -> None:
    """The quantile of the Gamma distribution, and never below `LOWEST_THRESHOLD` at a useful level."""
    reference = reference_of(planted(2 * BLOCK - 1, at=2 * BLOCK))  # no block yet: f = 1, nu_S = nu
    nu = reference.freedom
    assert reference.threshold(level, 16) == pytest.approx(gamma.isf(level, nu / 2, scale=2 / nu))
    assert reference.threshold(1e-7, 16) > LOWEST_THRESHOLD


@pytest.mark.parametrize("at", [4, 16, 24])
def test_an_alarm_begins_where_the_distribution_moves(at: int) -> None:
    """Within one record."""
    x_ND = planted(132, at=100 + at)
    alarm = mean_embedding_test(window_of(x_ND[100:]), reference_of(x_ND[:100]), 1e-3, n=16)
    assert alarm is not None
    assert abs(alarm.records[0].ordinal - at) <= 1


@pytest.mark.parametrize("n", [8, 16])
def test_borrowed_records_are_compared_together(n: int) -> None:
    """Each lies within a regime's spread, their mean does not. The regime's own raise no alarm, nor do fewer than n."""
    known = planted(300, at=300)
    reference = reference_of(known, pooled_metric([distribution_of(known)]))
    own, borrowed = planted(400, at=300, size=0.0)[300:], planted(400, at=300, size=5.0)[300:]
    nearer = [reference.distance(x_D) < 2 * reference.spread for x_D in borrowed[:n]]
    assert np.mean(nearer) > 0.9

    def alarm_of(x_ND: NDArray[np.float32]) -> Alarm | None:
        return borrowed_test(Absence(), window_of(x_ND).records, reference, LEVEL, n=n)

    assert alarm_of(own[:32]) is None
    assert alarm_of(borrowed[: n - 1]) is None
    alarm = alarm_of(np.concatenate([own[:8], borrowed[:n]]))
    assert alarm is not None
    assert alarm.statistic > alarm.threshold == reference.threshold(LEVEL, n)
    assert 0 < alarm.records[0].ordinal <= 8, "all that were borrowed, and perhaps a few before them"


def test_records_of_other_regimes_are_not_compared_as_borrowed() -> None:
    """Only those in the slot of the newest."""
    known, other = planted(300, at=300), planted(340, at=300, size=8.0)[300:]
    mixed = window_of(np.concatenate([other[:16], known[:8]])).records
    records = tuple(replace(record, slot=1 + (i >= 16)) for i, record in enumerate(mixed))
    reference = reference_of(known)
    assert borrowed_test(Absence(), records[:16], reference, LEVEL, n=8) is not None
    assert borrowed_test(Absence(), records, reference, LEVEL, n=8) is None


def stats_of(fits: Sequence[float]) -> RunningStats:
    stats = RunningStats()
    for fit in fits:
        stats = stats.after(fit)
    return stats


def test_the_fit_statistic_is_equation_7() -> None:
    """With mean, deviation and lag-1 correlation of the fits before the window."""
    rng = np.random.default_rng(0)
    before, window = rng.normal(0.2, 0.1, size=200), rng.normal(-0.1, 0.1, size=16)
    tested = replace(window_of(fits=window.tolist()), fits_before=stats_of(before.tolist()))
    alarm = fit_drop_test(tested, NOTHING, 1e-6, n=16)
    assert alarm is not None
    m, s = before.mean(), before.std()
    rho = max((np.mean(before[1:] * before[:-1]) - m**2) / s**2, 0.0)
    f = (1 + rho) / (1 - rho)
    assert alarm.statistic == pytest.approx((m - window.mean()) / (s * np.sqrt(f * (1 / 16 + 1 / 200))), rel=0.02)
    assert alarm.threshold == pytest.approx(student.isf(1e-6, 199))


@pytest.mark.parametrize("at", [4, 16, 24])
def test_an_alarm_begins_where_the_fits_drop(at: int) -> None:
    """Within one record."""
    fits = np.random.default_rng(1).normal(0.2, 0.05, size=132)
    fits[100 + at :] -= 0.5
    tested = replace(window_of(fits=fits[100:].tolist()), fits_before=stats_of(fits[:100].tolist()))
    alarm = fit_drop_test(tested, NOTHING, LEVEL, n=16)
    assert alarm is not None
    assert abs(alarm.records[0].ordinal - at) <= 1


def token_alarm(has_token: Sequence[bool], before: float, of: float) -> Alarm | None:
    """Test a window whose records have token 7 or not, after `of` records, `before` of which had it."""
    counts_B = np.zeros(NUM_BUCKETS, dtype=np.float32)
    counts_B[[7, 1, 2]] = before, 0.3 * of, 0.3 * of  # 1 and 2 are neither rare nor common before
    window = window_of(tokens=[[1, 7] if has else [1, 2] for has in has_token])
    return token_presence_test(replace(window, tokens_before=DocumentFrequency(counts_B, of)), NOTHING, LEVEL)


def test_the_token_statistic_is_equation_8() -> None:
    """The beta-binomial probability of the token's count in the window."""
    alarm = token_alarm([True] * 30 + [False] * 2, 2, 100)
    assert alarm is not None
    assert alarm.token_change is not None
    assert (alarm.token_change.bucket, alarm.token_change.appeared) == (7, True)
    assert alarm.statistic == pytest.approx(-betabinom.logpmf(30, 32, 2.5, 98.5))
    assert alarm.statistic > alarm.threshold


def test_only_changes_between_rare_and_common_count() -> None:
    """A token in a quarter of the records before is not rare, however common it is now."""
    assert token_alarm([True] * 32, 250, 1000) is None
    disappeared = token_alarm([False] * 32, 950, 1000)
    assert disappeared is not None
    assert disappeared.token_change is not None
    assert not disappeared.token_change.appeared


@pytest.mark.parametrize("appeared", [True, False])
def test_an_alarm_begins_where_the_token_changes(appeared: bool) -> None:
    """Single records that disagree do not move it."""
    has_token = [not appeared] * 1 + [appeared] * 31
    has_token[20] = appeared
    alarm = token_alarm(has_token, 0 if appeared else 1000, 1000)
    assert alarm is not None
    assert alarm.records[0].ordinal == 1


def test_absence_follows_its_equations() -> None:
    """Eq. (9) and (10), spelled out; the run starts where the statistic leaves 0."""
    absence, c, share, start = Absence(), 0.0, 0.0, 0
    for ordinal, own in enumerate(np.random.default_rng(0).random(200) < 0.4, start=1):
        p = min(max(share, 0.03), 0.95)
        if own:
            c = max(0.0, c + math.log(0.03 / (1 - p)))
        else:
            start = ordinal if c == 0.0 else start
            c += math.log(0.97 / p)
        share += ((not own) - share) / 32
        absence = absence.after(ordinal, own=bool(own))
        assert absence.run_start == start
        assert (absence.statistic, absence.share) == pytest.approx((c, share))


@pytest.mark.parametrize("others", [0.0, 0.3, 0.6])
def test_interleaved_regimes_are_no_absence(others: float) -> None:
    """A constant share of other regimes' records raises no alarm in 5,000 records."""
    absence = Absence()
    for ordinal, own in enumerate(np.random.default_rng(1).random(5000) >= others, start=1):
        absence = absence.after(ordinal, own=bool(own))
        assert absence_test(absence, (), NOTHING, LEVEL) is None
