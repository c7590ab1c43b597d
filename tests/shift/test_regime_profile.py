"""A profile measures how well its regime explains a record."""

import numpy as np

from streamlearn.shift.memory import NUM_SAMPLED, RegimeProfile
from tests.shift.records import features_of, memory_of


def test_a_regimes_own_records_fit_it() -> None:
    """New records of the regime lie around its usual fit, those of another task far below."""
    regimes = memory_of((0, 100), (1, 100), max_regimes=3)
    fits = [
        np.mean(
            [regimes[0].fit(float(regimes.score(each).log_ratios_R[0]), each) for each in features_of(task, 30, seed=8)]
        )
        for task in (0, 2)
    ]
    assert abs(fits[0]) < 1
    assert fits[1] < -3


def test_the_sample_is_bounded_and_uniform() -> None:
    """Half of a stream contributes about half of it."""
    shares = []
    for number in range(1, 41):
        profile = RegimeProfile(number, 1)
        for i, record in enumerate(features_of(0, 64, seed=number)):
            profile.add(record, i + 1)
            profile.offer(record, i + 1)
            if i == 31:
                half = profile.exemplars
        assert len(profile.sample) == NUM_SAMPLED
        shares += [any(each is old for old in half) for each in profile.exemplars]
    assert 0.4 < np.mean(shares) < 0.6
