"""What the room keeps of a record: two bounded summaries of its input, label tokens left out.

    x = (1/T) sum_t E[t],  phi(x) = sqrt(2/D) (cos w_i x, sin w_i x), i = 1 .. D/2                        (1)
    b = (t mod B for every token; hash(position, t) mod B for the first 2 and the last 3)                  (2)

phi is D random Fourier features (Rahimi & Recht 2007) of the mean embedding x: |phi| = 1, and the mean of phi over
records is a kernel mean embedding of their distribution (Gretton et al. 2012), which is what the change test compares.
The w are drawn for two Gaussian kernels of widths 1 and 2, where distances between real records lie: 1.1 with a
definition in the prompt, 2.0 for short bare inputs. The buckets b, with the length, tell single records apart.
"""
# Shape suffixes: B buckets, E embedding, D features, T tokens.

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.stream.decode import IGNORED, Example

NUM_BUCKETS = 4096
NUM_FEATURES = 256
EMBEDDING = 64
WIDTHS = (1.0, 2.0)
FIRST, LAST = 2, 3
_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: neighbours land far apart


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """A record's summaries."""

    phi_D: NDArray[np.float32]
    """Eq. (1)."""
    buckets: NDArray[np.int32]
    """Eq. (2)."""
    log_length: float
    """Natural logarithm of the number of tokens."""


class Signer:
    """Turns input tokens into signatures; a function of the seed and of the tokens alone."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0x5168])
        self._embedding_BE = rng.standard_normal((NUM_BUCKETS, EMBEDDING), dtype=np.float32)
        per_width = NUM_FEATURES // 2 // len(WIDTHS)
        directions = [rng.standard_normal((EMBEDDING, per_width), dtype=np.float32) / width for width in WIDTHS]
        self._directions_ED = np.concatenate(directions, axis=1).astype(np.float32)

    def sign(self, tokens_T: NDArray[np.int32]) -> Signature:
        """Both summaries of one input; it must hold a token."""
        unigrams = (tokens_T % NUM_BUCKETS).astype(np.int32)
        x_E = np.add.reduce(self._embedding_BE.take(unigrams, axis=0), axis=0) / np.float32(len(unigrams))
        angles = x_E @ self._directions_ED
        phi_D = np.concatenate([np.cos(angles), np.sin(angles)]) * np.float32((2 / NUM_FEATURES) ** 0.5)
        edges = np.concatenate([_placed(tokens_T[:FIRST], 1), _placed(tokens_T[-LAST:][::-1], 1 + FIRST)])
        return Signature(phi_D, np.concatenate([unigrams, edges]), float(np.log(len(unigrams))))


def input_of(example: Example) -> NDArray[np.int32]:
    """The tokens that are read and not learned; all of them where everything is learned, as in plain text."""
    read = example.input_ids[example.labels == IGNORED]
    return read if len(read) > 1 else example.input_ids  # nothing predicts a first token, so it is never learned


def _placed(tokens: NDArray[np.int32], place: int) -> NDArray[np.int32]:
    """Buckets of tokens that stand at places `place`, `place` + 1, ..."""
    places = np.arange(place, place + len(tokens), dtype=np.uint64)
    hashed = (tokens.astype(np.uint64) * np.uint64(31) + places) * np.uint64(_GOLDEN)
    return ((hashed >> np.uint64(16)) % np.uint64(NUM_BUCKETS)).astype(np.int32)
