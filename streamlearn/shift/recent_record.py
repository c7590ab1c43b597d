"""A record that may still be moved to another regime."""
# Shape suffixes: D features, N records.

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamlearn.shift.featurizer import NUM_FEATURES, Features


@dataclass(frozen=True, eq=False)
class RecentRecord:
    """A record with the slot of its regime."""

    features: Features
    ordinal: int
    slot: int
    log_ratio: float
    """Under the slot's regime when the record arrived, nats (`naive_bayes`, eq. 2)."""

    @property
    def fit(self) -> float:
        """The log ratio per bucket."""
        return self.log_ratio / len(self.features.buckets)


def stack_phi(records: Iterable[RecentRecord]) -> NDArray[np.float32]:
    """The phi of each record as one array."""
    phi = [each.features.phi_D for each in records]
    return np.array(phi, dtype=np.float32).reshape(len(phi), NUM_FEATURES)
