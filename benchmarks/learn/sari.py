"""SARI, the metric of text simplification (Xu et al. 2016).

With I, O and R the n-grams of input, output and reference, #g their counts and n = 1 to 4:

    p_add(n)  = |O - I & R| / |O - I|,            r_add(n)  = |O - I & R| / |R - I|                          (1)
    p_keep(n) = sum min(#g(I & O), #g(I & R)) / sum #g(I & O),
    r_keep(n) = sum min(#g(I & O), #g(I & R)) / sum #g(I & R)                                                (2)
    p_del(n)  = sum min(#g(I - O), #g(I - R)) / sum #g(I - O)                                                (3)
    SARI = (F_add + F_keep + P_del) / 3,  P and R the means over n,  F = 2 P R / (P + R)                     (4)

Eq. (1) counts each n-gram once, eq. (2) and (3) as often as it occurs. 0 / 0 is 1: nothing to do was done right. These
are the formulas for one reference. Other implementations take F of each n and then the mean. Words are those of
`jobs.runner.normalize`.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from streamlearn.jobs.runner import normalize

ORDERS = range(1, 5)


def sari(source: str, output: str, reference: str) -> float:
    """Compute eq. (4), in [0, 1].

    >>> round(sari("a b", "a c", "a c"), 3)
    1.0
    """
    texts = [normalize(text) for text in (source, output, reference)]
    by_order = [_by_order(*(_ngrams(words, order) for words in texts)) for order in ORDERS]
    p_add, r_add, p_keep, r_keep, p_del = (fmean(figures) for figures in zip(*by_order, strict=True))
    return (_f1(p_add, r_add) + _f1(p_keep, r_keep) + p_del) / 3


def _by_order(source: Counter[str], output: Counter[str], reference: Counter[str]) -> tuple[float, ...]:
    """Eq. (1) to (3) of one n."""
    added, missing = set(output) - set(source), set(reference) - set(source)
    good = len(added & missing)
    kept, to_keep = source & output, source & reference
    both = (kept & to_keep).total()
    deleted = source - output
    return (
        _ratio(good, len(added)),
        _ratio(good, len(missing)),
        _ratio(both, kept.total()),
        _ratio(both, to_keep.total()),
        _ratio((deleted & (source - reference)).total(), deleted.total()),
    )


def _ngrams(words: Sequence[str], order: int) -> Counter[str]:
    return Counter(" ".join(words[i : i + order]) for i in range(len(words) - order + 1))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
