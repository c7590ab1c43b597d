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
from streamlearn.shift.features import NUM_BUCKETS, NUM_FEATURES, DocumentFrequency, Features

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
        assert absence_test(absence, (), LEVEL) is None
