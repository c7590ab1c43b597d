"""What tells the records of two regimes apart, for people: tokens that came and went, and typical records.

    G_b = 2 sum over has, lacks of (O log(O / E)),   signed by the difference of the shares                 (1)

O is the number of records of each regime with bucket b, or without it, and E what independence lets expect (the log
likelihood ratio of Dunning 1993, on document frequencies). A bucket is named by the token in it that most of the
regime's known records have.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from streamlearn.shift.features import NUM_BUCKETS, DocumentFrequency, Featurizer

MIN_STATISTIC = 6.63
"""Quantile .99 of chi-squared with one degree of freedom: what chance explains is not listed."""
MIN_RECORDS = 3
"""Records that a token must occur in: words of one record are its content, and are not for the log."""
NUM_TYPICAL = 3
MAX_PIECES = 8
"""Tokens on either side that a word is completed with."""
_WORD = re.compile(r"\w(?:[\w']*\w)?")


class Place(NamedTuple):
    """A token in a record."""

    tokens_T: NDArray[np.int32]
    at: int


def characteristic_tokens(
    own: DocumentFrequency, other: DocumentFrequency, inputs: Sequence[NDArray[np.int32]]
) -> list[Place]:
    """Tokens that records of a regime have more often than those of another, by eq. (1), the largest first.

    `inputs` are some of the regime's records, in which the tokens are found. Buckets also hold positions and tokens of
    other records: a token is left out unless at least half as many of these records have it as the frequencies say. Of
    equals the token with the highest id comes first, which is the rarest in most tokenizers.
    """
    statistic_B = np.where(own.records_B >= MIN_RECORDS, log_likelihood_ratio(own, other), 0.0)
    share_B = own.records_B / max(own.num_records, 1.0)
    documents = Counter(token for tokens_T in inputs for token in set(tokens_T.tolist()))
    best: dict[int, int] = {}
    for token, number in sorted(documents.items(), key=lambda item: (-item[1], item[0])):
        bucket = token % NUM_BUCKETS
        if bucket not in best and statistic_B[bucket] >= MIN_STATISTIC and 2 * number >= share_B[bucket] * len(inputs):
            best[bucket] = token
    tokens = sorted(best.values(), key=lambda token: (-statistic_B[token % NUM_BUCKETS], -token))
    return [next(Place(row, int(np.argmax(row == token))) for row in inputs if token in row) for token in tokens]


def word_at(place: Place, to_text: Callable[[Sequence[int]], str]) -> str:
    """The word that a token is part of; empty where it is part of none."""
    first = max(place.at - MAX_PIECES, 0)
    tokens: list[int] = place.tokens_T[first : place.at + MAX_PIECES + 1].tolist()
    texts = [to_text(tokens[:number]) for number in range(len(tokens) + 1)]
    start, end = len(texts[place.at - first]), len(texts[place.at - first + 1])
    words = [word for word in _WORD.finditer(texts[-1]) if word.start() < end and word.end() > start]
    return max((word.group() for word in words), key=len, default="")


def log_likelihood_ratio(own: DocumentFrequency, other: DocumentFrequency) -> NDArray[np.float64]:
    """Eq. (1), above 0 where `own` has the bucket more often."""
    has_2B = np.array([own.records_B, other.records_B], dtype=np.float64)
    num_21 = np.array([[own.num_records], [other.num_records]], dtype=np.float64)
    total = max(float(num_21.sum()), 1.0)
    lacks_2B = num_21 - has_2B
    terms_B = np.zeros(has_2B.shape[1])
    for observed_2B in (has_2B, lacks_2B):
        expected_2B = num_21 * observed_2B.sum(axis=0) / total
        terms_B += xlogy(observed_2B, observed_2B / np.where(expected_2B > 0, expected_2B, 1.0)).sum(axis=0)
    share_2B = has_2B / np.maximum(num_21, 1.0)
    signed_B: NDArray[np.float64] = 2 * terms_B * np.sign(share_2B[0] - share_2B[1])
    return signed_B


def typical_records(inputs: Sequence[NDArray[np.int32]], featurizer: Featurizer) -> list[int]:
    """Indices of the inputs whose features are nearest to their mean, the nearest first."""
    if not inputs:
        return []
    x_ND = np.array([featurizer.featurize(tokens_T).x_D for tokens_T in inputs])
    order: list[int] = np.argsort(-(x_ND @ x_ND.mean(axis=0)), kind="stable")[:NUM_TYPICAL].tolist()
    return order
