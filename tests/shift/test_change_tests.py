"""Each test follows its equation. `tests/contracts/test_detectors.py` holds all of them to their level and delay."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import betabinom, gamma
from scipy.stats import t as student

from streamlearn.shift.change_tests import (
    LOWEST_THRESHOLD,
    MIN_BEFORE,
    REFERENCE_HALVED_AT,
    WINDOW_TESTS,
    Absence,
    Alarm,
    RecentRecord,
    ReferenceDistribution,
    RunningStats,
    Window,
    absence_test,
    embedding_threshold,
    fit_drop_test,
    mean_embedding_test,
    token_presence_test,
)
from streamlearn.shift.features import NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features, Featurizer, input_of
from tests.shift.records import features_of, memory_of, recent
from tests.shift.streams import questions

LEVEL = 1e-7
NOTHING = ReferenceDistribution()


def window_of(
    phi_ND: NDArray[np.float32] | None = None,
    fits: Sequence[float] | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
) -> Window:
    """A window of records with these phi, fits or tokens."""
    number = next(len(column) for column in (phi_ND, fits, tokens) if column is not None)
    phi_ND = np.zeros((number, NUM_FEATURES), dtype=np.float32) if phi_ND is None else phi_ND
    buckets = [np.array(ids, dtype=np.uint16) for ids in tokens or [[0]] * number]
    features = [Features(phi_D, ids, 0.0) for phi_D, ids in zip(phi_ND, buckets, strict=True)]
    pairs = zip(features, [0.0] * number if fits is None else fits, strict=True)
    return Window(tuple(RecentRecord(each, i, 0, fit * len(each.buckets)) for i, (each, fit) in enumerate(pairs)))


def unit_vectors(number: int, *, repeated: int = 1, seed: int = 0, offset: float = 10.0) -> NDArray[np.float32]:
    """Random directions, each `repeated` times in a row."""
    phi = np.random.default_rng(seed).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    phi[:, 0] += offset
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    return phi.repeat(repeated, axis=0)


def reference_of(phi_ND: NDArray[np.float32]) -> ReferenceDistribution:
    reference = ReferenceDistribution()
    for i, phi_D in enumerate(phi_ND):
        reference = reference.after(phi_D, phi_ND[i + 1 :])
    return reference


def test_mean_and_spread_are_equation_1() -> None:
    """Spread is the trace of the unbiased covariance."""
    phi = unit_vectors(200)
    reference = reference_of(phi)
    np.testing.assert_allclose(reference.mean, phi.mean(axis=0), atol=1e-6)
    assert reference.spread == pytest.approx(np.trace(np.cov(phi.T)), rel=1e-4)


def test_inflation_is_equation_3() -> None:
    """Independent records have f_n near 1; records in bursts of four have the variance of n / 4 independent ones."""
    assert reference_of(unit_vectors(2000)).inflation(16) == pytest.approx(1.0, abs=0.1)
    k = np.arange(1, 4)
    expected = 1 + 2 * np.sum((1 - k / 16) * (1 - k / 4))
    assert reference_of(unit_vectors(2000, repeated=4)).inflation(16) == pytest.approx(expected, rel=0.05)


def test_freedom_is_the_effective_number_of_dimensions() -> None:
    """For an isotropic distribution, about all of them."""
    assert 0.8 * NUM_FEATURES < reference_of(unit_vectors(2000)).freedom < NUM_FEATURES


def test_merging_adds_the_records() -> None:
    """Neither of the two changes."""
    one, other = reference_of(unit_vectors(50, seed=1)), reference_of(unit_vectors(30, seed=2))
    merged = one.merged(other)
    assert (one.num_records, merged.num_records) == (50, 80)
    assert np.array_equal(merged.sum_D, one.sum_D + other.sum_D)
    assert merged.squares == one.squares + other.squares


def test_old_records_fade() -> None:
    """At the bound the sums are halved; the mean stays."""
    reference = replace(reference_of(unit_vectors(10)), num_records=REFERENCE_HALVED_AT - 1.0)
    phi_D = unit_vectors(1, seed=3)[0]
    halved = reference.after(phi_D, np.zeros((0, NUM_FEATURES), dtype=np.float32))
    assert halved.num_records == REFERENCE_HALVED_AT / 2
    assert np.array_equal(halved.sum_D, (reference.sum_D + phi_D) / 2)


def planted(number: int, at: int, size: float = 8.0) -> NDArray[np.float32]:
    """Unit vectors, one coordinate of which moves at record `at`."""
    phi = np.random.default_rng(0).normal(size=(number, NUM_FEATURES)).astype(np.float32)
    phi[at:, 0] += size
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    return phi


def test_the_embedding_statistic_is_equation_5() -> None:
    """The older part of the window counts to the regime before it."""
    phi = planted(132, at=116, size=4.0)
    reference = reference_of(phi[:100])
    alarm = mean_embedding_test(window_of(phi[100:]), reference, 1e-3, n=16)
    assert alarm is not None
    difference = phi[116:].mean(axis=0) - phi[:116].mean(axis=0)
    chance = reference.spread * reference.inflation(16) * (1 / 16 + 1 / 116)
    assert alarm.statistic == pytest.approx(float(difference @ difference) / chance, rel=1e-4)


@pytest.mark.parametrize("level", [1e-3, 1e-7])
def test_the_embedding_threshold_is_equation_6(level: float) -> None:
    """The quantile of the Gamma distribution, and never below `LOWEST_THRESHOLD` at a useful level."""
    reference = reference_of(planted(100, at=100))
    nu = reference.freedom
    assert embedding_threshold(reference, level) == pytest.approx(gamma.isf(level, nu / 2, scale=2 / nu))
    assert embedding_threshold(reference, 1e-7) > LOWEST_THRESHOLD


@pytest.mark.parametrize("at", [4, 16, 24])
def test_an_alarm_begins_where_the_distribution_moves(at: int) -> None:
    """Within one record."""
    phi = planted(132, at=100 + at)
    alarm = mean_embedding_test(window_of(phi[100:]), reference_of(phi[:100]), 1e-3, n=16)
    assert alarm is not None
    assert abs(alarm.records[0].ordinal - at) <= 1


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


def test_an_outlier_is_clipped() -> None:
    """It moves the mean by at most five deviations' worth of one record."""
    stats = stats_of([0.1, -0.1] * 50)
    assert stats.after(-100.0).mean == pytest.approx(stats.mean - 5 * stats.deviation / 101)


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


def test_tokens_need_a_full_window_and_enough_records_before_it() -> None:
    """Otherwise nothing is tested."""
    assert token_alarm([True] * 31, 0, 100) is None
    assert token_alarm([True] * 32, 0, MIN_BEFORE - 1) is None


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
        assert absence_test(absence, (), LEVEL) is None


def test_a_new_segment_starts_with_the_share_of_its_own_records() -> None:
    """Of the newest 32 records, 8 are its own; the start of the last run is kept."""
    regimes = memory_of((0, 0), max_regimes=2)
    records = [record for start in (60, 93) for record in recent(features_of(0, 8), 0, start=start, regimes=regimes)]
    assert Absence(0.1, 12.0, 70).restarted(records[7:], 100) == Absence(1 - 8 / 32, 0.0, 70)


def test_an_absence_alarm_takes_the_most_frequent_regime() -> None:
    """Among the records since the run began."""
    regimes = memory_of((0, 0), (1, 0), max_regimes=2)
    records = recent(features_of(0, 9), 0, start=1, regimes=regimes)
    records += recent(features_of(1, 6), 1, start=10, regimes=regimes)
    for run_start, expected in ((1, records[:9]), (6, records[9:])):
        alarm = absence_test(Absence(0.9, 100.0, run_start), records, LEVEL)
        assert alarm is not None
        assert alarm.records == expected


def first_alarm(records: Sequence[Features]) -> Alarm | None:
    """Move a window over the records of one regime until a test raises an alarm."""
    regimes = memory_of((0, 0), max_regimes=2)
    added = recent(list(records), 0, start=1, regimes=regimes)
    window, reference = Window(), ReferenceDistribution()
    for end in range(32, len(added) + 1):
        window = Window(added[end - 32 : end], window.fits_before, window.tokens_before)
        alarms = [test(window, reference, LEVEL) for test in WINDOW_TESTS] if end > 64 else []
        if alarm := next(filter(None, alarms), None):
            return alarm
        oldest, *rest = window.records
        reference = reference.after(oldest.features.phi_D, np.array([record.features.phi_D for record in rest]))
        fits = window.fits_before.after(oldest.fit) if end > 96 else window.fits_before
        window = Window((), fits, window.tokens_before.after(oldest.features.buckets))
    return None


def test_a_stationary_segment_raises_no_alarm() -> None:
    """In 400 records."""
    assert first_alarm(features_of(0, 400)) is None


def test_another_task_raises_an_alarm_with_its_records() -> None:
    """From the change point on, and without a token change."""
    alarm = first_alarm([*features_of(0, 150), *features_of(1, 50)])
    assert alarm is not None
    assert alarm.token_change is None
    assert alarm.statistic > alarm.threshold
    assert abs(alarm.records[0].ordinal - 151) <= 1


@pytest.mark.parametrize("appeared", [True, False])
def test_one_token_raises_an_alarm(appeared: bool) -> None:
    """Whether it appears or disappears."""
    featurizer = Featurizer(0)
    examples = questions([appeared] * 150 + [not appeared] * 50)
    alarm = first_alarm([featurizer.featurize(input_of(example)) for example in examples])
    assert alarm is not None
    assert alarm.token_change is not None
    assert (alarm.token_change.bucket, alarm.token_change.appeared) == (7, appeared)
    assert abs(alarm.records[0].ordinal - 151) <= 3
