"""Features of a record's input: the mean of its tokens in a table of vectors, and hashed tokens. Labels are left out.

    x = sum_t E[t] / |sum_t E[t]|                                                                           (1)
    b = (t mod B for every token; hash(position, t) mod B for the first 2 and the last 3)                   (2)

E is the backbone's own table of token embeddings (`token_vectors`), so inputs that mean alike lie near
each other in other words, too. Tokens that it lacks get random vectors: visual words, and all tokens of a tokenizer
without a model. The tests compare them whitened (`reference`, eq. 1).

The buckets b, with the length, classify single records; requests go by x as well (`routing`). A longer input is
represented by its beginning and its end, where instructions usually are, and by evenly spaced tokens between them.
"""
# Shape suffixes: B buckets, D features, T tokens, V vocabulary, W width of a backbone.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamlearn.stream.record import IGNORED, Example, Prompt, RecordImage

NUM_BUCKETS = 4096
NUM_FEATURES = 128
HEAD, BETWEEN, TAIL = 96, 96, 64
"""Maximum tokens used: from the beginning, the middle and the end."""
FIRST, LAST = 2, 3
"""Tokens that are also hashed with their position: at the beginning and at the end."""
_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: neighbors land far apart

COMMON = 0.6
"""A token is common if at least this share of the records have it."""
HALVED_AT = 4096.0
"""Records at which document frequencies are halved, so that old records fade."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A record's features."""

    x_D: NDArray[np.float32]
    """Eq. (1)."""
    buckets: NDArray[np.uint16]
    """Eq. (2)."""
    log_length: float
    """Natural logarithm of the number of tokens."""


def projection(width: int) -> NDArray[np.float32]:
    """A random projection of vectors of a backbone's width to `NUM_FEATURES` numbers, which keeps distances, (W, D).

    Johnson & Lindenstrauss 1984. It is the same for every daemon.
    """
    return _generator(0).standard_normal((width, NUM_FEATURES), dtype=np.float32)


CHUNK = 8192
"""Rows of a table of embeddings that are converted at a time."""


def token_vectors(chunks_VW: Iterable[NDArray[np.float32]]) -> NDArray[np.float16]:
    """Project a backbone's token embeddings, `CHUNK` rows at a time, to unit vectors: the E of eq. (1), (V, D).

    Dimensions are standardized before, as in the first chunk, since a few of them are huge in many backbones.
    """
    vectors: list[NDArray[np.float16]] = []
    for rows_VW in chunks_VW:
        if not vectors:
            mean_W = rows_VW.mean(axis=0, dtype=np.float64).astype(np.float32)
            scale_W = np.maximum(rows_VW.std(axis=0, dtype=np.float64, ddof=1), 1e-12).astype(np.float32)
            projection_WD = projection(rows_VW.shape[1]) / scale_W[:, None]
        x_VD = (rows_VW - mean_W) @ projection_WD
        norm_V = np.maximum(np.linalg.norm(x_VD, axis=1), 1e-12)
        vectors.append((x_VD / norm_V[:, None]).astype(np.float16))
    return np.concatenate(vectors)


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 0x5168])


class Featurizer:
    """A function from input tokens to features: of the table, and of the seed for tokens without a vector."""

    def __init__(self, seed: int, table_VD: NDArray[np.float16] | None = None) -> None:
        """`table_VD`: the vector of each token, of unit length; None: all get random ones."""
        random_BD = _generator(seed).standard_normal((NUM_BUCKETS, NUM_FEATURES), dtype=np.float32)
        self._random_BD = random_BD / np.linalg.norm(random_BD, axis=1, keepdims=True)
        self.table_VD = np.zeros((0, NUM_FEATURES), np.float16) if table_VD is None else table_VD

    def featurize(self, tokens_T: NDArray[np.int32]) -> Features:
        """Features of one input, which must not be empty."""
        length = len(tokens_T)
        placed = enumerate([*tokens_T[:FIRST].tolist(), *tokens_T[: -LAST - 1 : -1].tolist()], start=1)
        edges = [((token * 31 + place) * _GOLDEN >> 16) % NUM_BUCKETS for place, token in placed]
        if length > HEAD + BETWEEN + TAIL:
            middle_T = tokens_T[HEAD + np.arange(BETWEEN) * (length - HEAD - TAIL) // BETWEEN]
            tokens_T = np.concatenate([tokens_T[:HEAD], middle_T, tokens_T[-TAIL:]])
        unigrams = (tokens_T % NUM_BUCKETS).astype(np.uint16)
        sum_D = self._sum(tokens_T, unigrams)
        x_D = sum_D / np.maximum(np.sqrt(sum_D @ sum_D), np.float32(1e-6))
        return Features(x_D, np.concatenate([unigrams, np.array(edges, dtype=np.uint16)]), float(np.log(length)))

    def _sum(self, tokens_T: NDArray[np.int32], unigrams: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Sum of the tokens' vectors; visual words, and tokens beyond the table, have random ones."""
        has_vector_T = (tokens_T >= 0) & (tokens_T < len(self.table_VD))
        sum_D: NDArray[np.float32] = self.table_VD[tokens_T[has_vector_T]].sum(axis=0, dtype=np.float32)
        sum_D += self._random_BD[unigrams[~has_vector_T]].sum(axis=0)
        return sum_D


def input_of(example: Example) -> NDArray[np.int32]:
    """The tokens that are not learned; all tokens if everything is learned, as in plain text. Those before truncation.

    Placeholder tokens of an image carry no content, so its visual words replace them.
    """
    if example.truncation is not None:
        return _with_visual_words(example.truncation.input_ids, example.images)
    unlearned = example.input_ids[example.labels == IGNORED]
    # Nothing predicts a first token, so it is never learned, not even in plain text.
    tokens = unlearned if len(unlearned) > 1 else example.input_ids
    return _with_visual_words(tokens, example.images)


def input_of_prompt(prompt: Prompt) -> NDArray[np.int32]:
    """The tokens of a prompt before truncation, with visual words in place of image placeholders."""
    if prompt.truncation is not None:
        return _with_visual_words(prompt.truncation.input_ids, prompt.images)
    return _with_visual_words(np.array(prompt.ids, dtype=np.int32), prompt.images)


def _with_visual_words(tokens: NDArray[np.int32], images: Sequence[RecordImage]) -> NDArray[np.int32]:
    if not images:
        return tokens
    is_placeholder = np.isin(tokens, [token for image in images for token in set(image.inputs.token_ids)])
    return np.concatenate([*(image.visual_words for image in images), tokens[~is_placeholder]])


@dataclass(frozen=True, eq=False)
class DocumentFrequency:
    """Number of records with each token, out of `num_records`. A value: updates return a new one."""

    records_B: NDArray[np.float32] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, dtype=np.float32))
    num_records: float = 0.0

    def after(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """Return the counts with one more record."""
        keep = 0.5 if self.num_records >= HALVED_AT else 1.0
        records_B = self.records_B.copy() if keep == 1.0 else self.records_B * np.float32(keep)
        records_B[buckets] += np.float32(1.0)  # a repeated index is written repeatedly and counts once
        return DocumentFrequency(records_B, self.num_records * keep + 1.0)

    def without(self, buckets: NDArray[np.uint16]) -> "DocumentFrequency":
        """Return the counts without one record that was counted before."""
        records_B = self.records_B.copy()
        records_B[buckets] -= np.float32(1.0)
        num_records = max(self.num_records - 1.0, 0.0)
        # Outside of this range only if the counts were halved in between.
        return DocumentFrequency(np.clip(records_B, 0.0, num_records, dtype=np.float32), num_records)

    def merged(self, other: "DocumentFrequency") -> "DocumentFrequency":
        """Return the sum of both counts."""
        return DocumentFrequency(self.records_B + other.records_B, self.num_records + other.num_records)

    @property
    def expected(self) -> NDArray[np.float32]:
        """Expected share of future records with each token (Jeffreys prior): never 0 or 1."""
        expected_B: NDArray[np.float32] = (self.records_B + np.float32(0.5)) / np.float32(self.num_records + 1.0)
        return expected_B
