"""Single records are told apart by their words, as the equations say."""

import math

import numpy as np
import torch

from streamlearn.shift import naive_bayes as words
from streamlearn.shift.featurizer import BETWEEN, HEAD, NUM_BUCKETS, TAIL, Featurizer, input_of
from streamlearn.stream.decode import Example
from tests.doubles import example

COUNTS = np.array([[30, 0, 10, 0], [0, 5, 1, 2]], dtype=np.float32)
TOTALS = np.array([400, 80], dtype=np.float32)


def spelled(buckets: list[int], regime: int) -> float:
    """Eq. (2), one bucket after the other."""
    total = 0.0
    for b in buckets:
        p = sum(COUNTS[r][b] / TOTALS[r] for r in range(2)) + 1 / NUM_BUCKETS
        p /= 3
        smoothed = (COUNTS[regime][b] + words.SMOOTHING * p) / (TOTALS[regime] + words.SMOOTHING)
        total += math.log(smoothed / p)
    return total


def test_log_ratios_are_equation_2() -> None:
    """For every regime, over all buckets, also where none was counted."""
    buckets = [0, 1, 2, 2, 3]
    expected = [spelled(buckets, regime) for regime in range(2)]
    c_RT = COUNTS[:, buckets]
    torch.testing.assert_close(words.log_ratios(c_RT, TOTALS).tolist(), expected, rtol=1e-4, atol=1e-4)
    apart = [float(words.bucket_log_ratios(c_RT, TOTALS, regime).sum()) for regime in range(2)]
    torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-4)


def test_what_is_missing_is_equation_4() -> None:
    """Only words that some regime usually has count, and together at most the bound."""
    shares = np.array([[0.9, 0.1, 0.5, 0.99], [0.2, 0.7, 0.3, 0.99]], dtype=np.float32)
    missing = words.MissingTokens.of(shares)
    # Bucket 2 is in C of neither regime; 0 and 3 are there, 0 twice.
    found = missing.scores(np.array([0, 3, 0], dtype=np.uint16))
    torch.testing.assert_close(found.tolist(), [math.log(0.9), math.log(0.3)], rtol=1e-4, atol=1e-4)
    bounded = missing.scores(np.array([2], dtype=np.uint16))
    both = math.log(0.8) + math.log(0.3) + math.log(0.01)
    torch.testing.assert_close(bounded.tolist(), [max(math.log(0.1 * 0.9 * 0.01), -8.0), both], rtol=1e-4, atol=1e-4)
    assert missing.scores(np.array([], dtype=np.uint16))[0] > -8.0
    assert words.MissingTokens.of(shares.repeat(3, axis=1)).scores(np.array([], dtype=np.uint16)).tolist() == [
        -8.0,
        -8.0,
    ]


def test_a_signature_is_a_function_of_seed_and_tokens() -> None:
    """And its phi has length 1."""
    tokens = np.arange(20, dtype=np.int32)
    one, same, other = (Featurizer(seed).featurize(tokens) for seed in (0, 0, 1))
    assert np.array_equal(one.phi_D, same.phi_D)
    assert not np.array_equal(one.phi_D, other.phi_D)
    assert abs(float(one.phi_D @ one.phi_D) - 1) < 1e-5


def test_a_signature_is_bounded() -> None:
    """Of a long input the beginning and the end are whole, and the length is the real one."""
    tokens = np.arange(4000, dtype=np.int32)
    features = Featurizer(0).featurize(tokens)
    assert len(features.buckets) <= HEAD + BETWEEN + TAIL + 5
    assert set(range(HEAD)) | set(range(4000 - TAIL, 4000)) <= set(features.buckets.tolist())
    assert features.log_length == math.log(4000)


def test_order_at_the_edges_matters() -> None:
    """The same words with another beginning are another record."""
    one, other = (
        Featurizer(0).featurize(np.array(ids, dtype=np.int32)) for ids in ([1, 2, 3, 4, 5, 6], [2, 1, 3, 4, 5, 6])
    )
    assert sorted(one.buckets.tolist()) != sorted(other.buckets.tolist())


def test_the_input_is_what_is_not_learned() -> None:
    """All of a plain text, whose first token alone is not learned."""
    assert input_of(example([1, 2, 3, 4, 5], prompt_length=3)).tolist() == [1, 2, 3]
    assert input_of(example([1, 2, 3, 4, 5], prompt_length=1)).tolist() == [1, 2, 3, 4, 5]


def test_an_answer_between_two_questions_is_left_out() -> None:
    """As in a conversation of several turns."""
    ids = np.array([1, 2, 3, 4, 5, 6], dtype=np.int32)
    labels = np.array([-100, -100, 3, -100, -100, 6], dtype=np.int32)
    assert input_of(Example(ids, labels)).tolist() == [1, 2, 4, 5]
