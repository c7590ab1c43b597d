"""Whether a regime's new version may be published: paired tests on its hold-out records.

    d_i = l_i(new) - l_i(other),   l: mean loss of record i over its learned tokens, nats                  (1)
    p   = share of all signs s in {-1, 1}^n for which mean_i s_i d_i >= mean_i d_i                         (2)

If the new version is no worse, the d_i are symmetric around 0 or lower, and p falls below the level with at most its
probability (Fisher's randomization test, one-sided; 9,999 random signs where n is large). The other is the untouched
backbone and, if there is one, the published version.

Records that came after the published version may be bad, and a version that learned them would look better on them.
So it is also compared on the records that the published version was tested on. Where too few of them are left, the
sample was replaced, which happens when the regime's answers changed: then nothing can show that the new version is no
worse, and an operator decides.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

RANDOM_SIGNS = 9_999
"""Signs that are drawn where 2^n is more."""


class HeldBack(StrEnum):
    """Why a version is not published."""

    TOO_FEW_RECORDS = "too_few_records"
    """The regime has fewer hold-out records than `publish.min_holdout_records`."""
    WORSE_THAN_BACKBONE = "worse_than_backbone"
    WORSE_THAN_PUBLISHED = "worse_than_published"
    ANSWERS_CHANGED = "answers_changed"
    """The answers changed, or may have: also where a regime began as the refused return of another. Or the regime was
    split. An operator decides."""
    NOT_LOADED = "not_loaded"
    """No replica could load it."""


@dataclass(frozen=True)
class Comparison:
    """A new version beside another, on the same records."""

    records: int
    loss: float
    """Of the new version, mean over the records, nats per token."""
    other_loss: float
    p_value: float
    """Eq. (2)."""


@dataclass(frozen=True)
class GateDecision:
    """What the gate found."""

    held_back: HeldBack | None
    """None: it may be published."""
    backbone: Comparison | None = None
    published: Comparison | None = None
    """On all records, or on those of the published version if it is worse there; None without a published version."""


Losses = Mapping[str, float]
"""Mean loss of each record, nats per token, by the record's digest."""


@dataclass(frozen=True)
class Gate:
    """The tests at one level."""

    level: float
    min_records: int

    def unscored(self, records: Collection[str], tested_on: Collection[str] | None) -> HeldBack | None:
        """Find what holds a version back whatever its losses are.

        Args:
            records: Digests of the regime's hold-out records.
            tested_on: Digests of those that the published version was tested on; None if there is none to compare with.
        """
        if tested_on is not None and len(set(tested_on) & set(records)) < self.min_records:
            return HeldBack.ANSWERS_CHANGED
        return HeldBack.TOO_FEW_RECORDS if len(records) < self.min_records else None

    def decide(
        self, new: Losses, backbone: Losses, published: Losses | None = None, tested_on: Collection[str] = ()
    ) -> GateDecision:
        """Decide about a version that `unscored` does not hold back.

        Args:
            new: Its losses on the regime's hold-out records.
            backbone: Those of the untouched backbone.
            published: Those of the published version; None if there is none to compare with.
            tested_on: Digests of the records that the published version was tested on.
        """
        beside_backbone = compare(new, backbone)
        if beside_backbone.p_value <= self.level:
            return GateDecision(HeldBack.WORSE_THAN_BACKBONE, beside_backbone)
        if published is None:
            return GateDecision(None, beside_backbone)
        beside_published = compare(new, published)
        earlier = {digest: loss for digest, loss in new.items() if digest in tested_on}
        for each in (compare(earlier, published), beside_published):
            if each.p_value <= self.level:
                return GateDecision(HeldBack.WORSE_THAN_PUBLISHED, beside_backbone, each)
        return GateDecision(None, beside_backbone, beside_published)


def compare(new: Losses, other: Losses) -> Comparison:
    """Compare on the records of `new`, all of which `other` has.

    >>> compare({"a": 2.0, "b": 3.0}, {"a": 1.0, "b": 1.0})
    Comparison(records=2, loss=2.5, other_loss=1.0, p_value=0.25)
    """
    new_N = np.array(list(new.values()))
    other_N = np.array([other[digest] for digest in new])
    test = permutation_test(
        (new_N, other_N),
        _mean_difference,
        permutation_type="samples",
        alternative="greater",
        n_resamples=RANDOM_SIGNS,
        vectorized=True,
        rng=np.random.default_rng(0),  # the decision must not depend on when it is asked for
    )
    return Comparison(len(new), float(new_N.mean()), float(other_N.mean()), float(test.pvalue))


def _mean_difference(new: NDArray[np.float64], other: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Mean of eq. (1)."""
    mean: NDArray[np.float64] = (new - other).mean(axis=axis)
    return mean
