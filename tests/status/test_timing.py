import doctest

from streamlearn import status as module
from streamlearn.status import BUCKETS_S, Timing


def test_examples_in_docstrings_hold() -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted) == (0, 2)


def test_an_observation_falls_into_the_bucket_of_its_upper_bound() -> None:
    timing = Timing().observe(BUCKETS_S[0]).observe(BUCKETS_S[1]).observe(1e9)
    assert timing.counts == (1, 1, *[0] * (len(BUCKETS_S) - 2), 1)
    assert timing.count == 3
    assert timing.last_s == 1e9


def test_observing_does_not_change_the_timing() -> None:
    empty = Timing()
    empty.observe(1.0)
    assert (empty.count, empty.total_s, empty.last_s) == (0, 0.0, None)
