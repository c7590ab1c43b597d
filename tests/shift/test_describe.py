"""What tells two regimes apart: the statistic, the tokens that are named, and the words that they are part of."""

from collections.abc import Sequence
from math import log

import numpy as np
import pytest
from numpy.typing import NDArray

from streamlearn.shift.describe import Place, characteristic_tokens, log_likelihood_ratio, typical_records, word_at
from streamlearn.shift.features import NUM_BUCKETS, DocumentFrequency, Featurizer


def frequency(*records: Sequence[int]) -> DocumentFrequency:
    counted = DocumentFrequency()
    for record in records:
        counted = counted.after(np.array(record, dtype=np.uint16))
    return counted


def inputs(*records: Sequence[int]) -> list[NDArray[np.int32]]:
    return [np.array(record, dtype=np.int32) for record in records]


def test_the_statistic_is_that_of_a_table_of_two_by_two() -> None:
    """Eq. (1), spelled as a loop, for 3 of 4 records against 1 of 6; the sign says who has it more often."""
    own, other = frequency([5], [5], [5], [6]), frequency([5], [6], [6], [6], [6], [6])
    expected = 0.0
    for observed, row, column in ((3, 4, 4), (1, 4, 6), (1, 6, 4), (5, 6, 6)):
        expected += 2 * observed * log(observed / (row * column / 10))
    statistic_B = log_likelihood_ratio(own, other)
    assert statistic_B[5] == pytest.approx(expected)
    assert statistic_B[6] == pytest.approx(-expected)
    assert statistic_B[7] == 0.0


def test_tokens_of_one_regime_are_named_and_what_both_have_is_not() -> None:
    """Token 9 is in all records of both; 8 and 4,103 of bucket 7 are in one regime's, the rarest of equals first."""
    own = [[9, 7 + NUM_BUCKETS, 8]] * 10
    places = characteristic_tokens(
        frequency(*([token % NUM_BUCKETS for token in row] for row in own)), frequency(*[[9, 3]] * 10), inputs(*own[:2])
    )
    assert [(place.tokens_T[place.at], place.at) for place in places] == [(7 + NUM_BUCKETS, 1), (8, 2)]


def test_a_token_that_only_shares_a_bucket_is_not_named() -> None:
    """All records have the bucket, by another token or a position; of the known ones one in four has this token."""
    own, other = frequency(*[[9]] * 10), frequency(*[[3]] * 10)
    assert characteristic_tokens(own, other, inputs([9, 1], [1], [1], [1])) == []


@pytest.mark.parametrize(
    ("index", "word"), [(0, "Un"), (1, "foreseen"), (2, "foreseen"), (3, ""), (4, "it's"), (5, "it's"), (6, "end")]
)
def test_a_token_is_shown_as_the_word_that_it_is_part_of(index: int, word: str) -> None:
    """Up to spaces and punctuation; a token without a letter or digit is not shown."""
    pieces = ["Un-", "fore", "seen", " -", " it", "'s", " end."]
    place = Place(np.arange(len(pieces), dtype=np.int32), index)
    assert word_at(place, lambda ids: "".join(pieces[i] for i in ids)) == word


def test_a_word_of_two_records_is_not_named() -> None:
    """It is what one of them says, not what the regime is about."""
    own, other = frequency([9], [9], [5], [5]), frequency(*[[3]] * 90)
    assert characteristic_tokens(own, other, inputs([9], [9])) == []
    assert characteristic_tokens(frequency([9], [9], [9], [5]), other, inputs([9], [9])) != []


def test_typical_records_are_those_nearest_to_the_mean() -> None:
    """An outlier among four alike is not one of the three."""
    featurizer = Featurizer(0)
    assert sorted(typical_records(inputs([1, 2, 3], [70, 80], [1, 2, 3], [1, 2, 3]), featurizer)) == [0, 2, 3]
    assert typical_records([], featurizer) == []
