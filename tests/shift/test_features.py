"""A record's features are a bounded function of its input tokens, and document frequency counts records."""

import math

import numpy as np
import pytest

from streamlearn.shift.features import (
    BETWEEN,
    HALVED_AT,
    HEAD,
    NUM_BUCKETS,
    NUM_FEATURES,
    TAIL,
    DocumentFrequency,
    Featurizer,
    input_of,
    projection,
    token_vectors,
)
from tests.doubles import example

ONE, OTHER = np.array([5, 5, 7], dtype=np.uint16), np.array([7], dtype=np.uint16)


def test_features_are_bounded() -> None:
    """Beginning and end of a long input are complete, and the length is the real one."""
    tokens = np.arange(4000, dtype=np.int32)
    features = Featurizer(0).featurize(tokens)
    assert len(features.buckets) <= HEAD + BETWEEN + TAIL + 5
    assert set(range(HEAD)) | set(range(4000 - TAIL, 4000)) <= set(features.buckets.tolist())
    assert features.log_length == math.log(4000)


def test_x_is_equation_1() -> None:
    """The direction of the sum of the tokens' vectors; tokens beyond the table, and visual words, have random ones."""
    rng = np.random.default_rng(0)
    table_VD = rng.normal(size=(10, NUM_FEATURES)).astype(np.float16)
    featurizer, bare = Featurizer(0, table_VD), Featurizer(0)
    sum_D = table_VD[[3, 3, 9]].astype(np.float32).sum(axis=0)
    x_D = featurizer.featurize(np.array([3, 9, 3], dtype=np.int32)).x_D
    np.testing.assert_allclose(x_D, sum_D / np.linalg.norm(sum_D), atol=1e-6)
    for tokens in ([10, NUM_BUCKETS + 10], [-1, -5000]):
        ids = np.array(tokens, dtype=np.int32)
        assert np.array_equal(featurizer.featurize(ids).x_D, bare.featurize(ids).x_D)
        assert float(np.linalg.norm(bare.featurize(ids).x_D)) == pytest.approx(1.0)


def test_token_vectors_do_not_depend_on_the_size_of_a_chunk() -> None:
    """The first chunk standardizes all rows, which are projected and have unit length."""
    weight = np.random.default_rng(0).normal(size=(100, 48)).astype(np.float32)
    rows = (weight - weight[:80].mean(axis=0)) / weight[:80].std(axis=0, ddof=1) @ projection(48)
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(token_vectors([weight[:80], weight[80:]]), expected, atol=2e-3)
    assert np.abs(token_vectors([weight]).astype(np.float32) * expected).sum(axis=1).min() > 0.9


def test_one_huge_dimension_does_not_decide_the_token_vectors() -> None:
    """Standardized, it counts like any other; a constant one does not count."""
    weight = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
    huge, constant = weight.copy(), weight.copy()
    huge[:, 3] = 1000 * huge[:, 3] + 5000
    constant[:, 3] = 5000.0
    np.testing.assert_allclose(token_vectors([huge]), token_vectors([weight]), atol=4e-3)
    cosines = (token_vectors([constant]).astype(np.float32) * token_vectors([weight]).astype(np.float32)).sum(axis=1)
    assert cosines.mean() > 0.95


def test_the_input_is_what_is_not_learned() -> None:
    """In plain text, where only the first token is not learned, it is the whole text."""
    assert input_of(example([1, 2, 3, 4, 5], prompt_length=3)).tolist() == [1, 2, 3]
    assert input_of(example([1, 2, 3, 4, 5], prompt_length=1)).tolist() == [1, 2, 3, 4, 5]


def test_counts_each_token_once_per_record() -> None:
    """Removing a record is the inverse of adding it, and merging adds both counts."""
    both = DocumentFrequency().after(ONE).after(OTHER)
    assert (both.records_B[[5, 7]].tolist(), both.num_records) == ([1.0, 2.0], 2.0)
    assert both.expected[[5, 7, 8]].tolist() == pytest.approx([0.5, 2.5 / 3, 0.5 / 3])
    back = both.without(ONE)
    assert (back.records_B[[5, 7]].tolist(), back.num_records) == ([0.0, 1.0], 1.0)
    merged = both.merged(back)
    assert (merged.records_B[[5, 7]].tolist(), merged.num_records) == ([1.0, 3.0], 3.0)


def test_a_share_stays_between_0_and_1() -> None:
    """A record that was counted before the counts were halved takes a whole one off."""
    records_B = np.full(4096, HALVED_AT, dtype=np.float32)
    records_B[5] = 1.0
    halved = DocumentFrequency(records_B, HALVED_AT).after(OTHER)
    without = halved.without(ONE)
    assert without.expected.min() > 0.0
    assert without.expected.max() < 1.0
    assert without.without(ONE).expected[5] > 0.0
