"""Exact match and ROUGE-L."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.jobs.runner import exact_match, normalize, rouge_l

word_lists = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


def test_scores_compare_words_in_lower_case_without_surrounding_punctuation() -> None:
    assert normalize('"(Yes)," he Don\'t said. 巴黎。 ...') == ["yes", "he", "don't", "said", "巴", "黎"]
    assert exact_match("", "") == exact_match("paris!", "Paris") == 1.0
    assert exact_match("", "Paris") == exact_match("Paris, France", "Paris") == 0.0
    assert [rouge_l(*pair) for pair in (("", ""), ("", "a b"), ("a b", ""))] == [1.0, 0.0, 0.0]
    assert rouge_l("a c b", "a b c") == pytest.approx(2 / 3), "a subsequence, not a set"


def longest(left: list[str], right: list[str]) -> int:
    """The definition as a recursion."""
    if not left or not right:
        return 0
    if left[-1] == right[-1]:
        return longest(left[:-1], right[:-1]) + 1
    return max(longest(left[:-1], right), longest(left, right[:-1]))


@given(word_lists.filter(bool), word_lists.filter(bool))
def test_rouge_l_equals_its_definition(left: list[str], right: list[str]) -> None:
    """F1 of precision and recall by the recursive length; symmetric in the two texts."""
    common = longest(left, right)
    precision, recall = common / len(left), common / len(right)
    expected = 2 * precision * recall / (precision + recall) if common else 0.0
    assert rouge_l(" ".join(left), " ".join(right)) == pytest.approx(expected)
    assert rouge_l(" ".join(right), " ".join(left)) == pytest.approx(expected)
