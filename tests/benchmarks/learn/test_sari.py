"""SARI, calculated by hand."""

import pytest

from benchmarks.learn.sari import sari


def test_a_perfect_simplification_scores_one() -> None:
    """It keeps, adds and deletes what the reference does."""
    assert sari("the old cat sat down", "the cat sat", "the cat sat") == pytest.approx(1)


def test_the_score_is_that_of_the_equations() -> None:
    """I = a b c, O = a b d, R = a d: every ratio of n = 1 and 2 is written out; longer n-grams follow.

    n = 1: added {d}, missing {d}: p = r = 1. Kept a, b, to keep a: p = 1/2, r = 1. Deleted c, to delete b, c: p = 1.
    n = 2: added {b d}, missing {a d}: p = r = 0. Kept a b, to keep none: p = 0/1, r = 0/0 = 1. Deleted b c: p = 1.
    n = 3: added {a b d}, missing none: p = 0, r = 1. Kept none, to keep none: p = r = 1. Deleted a b c: p = 1.
    n = 4: nothing: all 1.
    """
    p_add, r_add = (1 + 0 + 0 + 1) / 4, (1 + 0 + 1 + 1) / 4
    p_keep, r_keep = (1 / 2 + 0 + 1 + 1) / 4, 1.0
    add = 2 * p_add * r_add / (p_add + r_add)
    keep = 2 * p_keep * r_keep / (p_keep + r_keep)
    assert sari("a b c", "a b d", "a d") == pytest.approx((add + keep + 1) / 3)


def test_repeated_words_count_as_often_as_they_occur() -> None:
    """I = a a b, O = a, R = a b; unigrams: kept 1 of 1, to keep 2, deleted a, b where only one a is to be deleted.

    n = 2: kept none, to keep a b; deleted a a, a b, to delete a a. n = 3: deleted a a b, to delete it. n = 4: nothing.
    """
    p_keep, r_keep = 1.0, (1 / 2 + 0 + 1 + 1) / 4
    p_del = (1 / 2 + 1 / 2 + 1 + 1) / 4
    keep = 2 * p_keep * r_keep / (p_keep + r_keep)
    assert sari("a a b", "a", "a b") == pytest.approx((1 + keep + p_del) / 3)


def test_copying_the_source_earns_only_what_was_kept() -> None:
    """Nothing is added although the reference adds."""
    assert sari("a b c d", "a b c d", "x y z w") == pytest.approx(
        (2 * 1 * 0 + 0 + 1) / 3
    )  # F_add 0: r_add = 0; F_keep 0; P_del = 1, since nothing was deleted
