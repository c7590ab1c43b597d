"""Exact match and ROUGE-L."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.jobs.runner import exact_match, normalize, rouge_l

word_lists = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" ... ", []),
        ("Don't stop!", ["don't", "stop"]),
        ('"(Yes)," he said.', ["yes", "he", "said"]),
        ("巴黎。", ["巴", "黎"]),
        ("Zürich", ["zürich"]),
        ("naïve idea", ["naïve", "idea"]),
    ],
)
def test_normalised_texts_are_lower_case_words(text: str, tokens: list[str]) -> None:
    """Punctuation is removed around words and kept inside; each wide character is a word."""
    assert normalize(text) == tokens


@pytest.mark.parametrize(
    ("output", "reference", "score"),
    [("", "", 1.0), ("", "Paris", 0.0), ("paris!", "Paris", 1.0), ("Paris, France", "Paris", 0.0), ("...", "", 1.0)],
)
def test_exact_match_is_all_or_nothing(output: str, reference: str, score: float) -> None:
    """Case and punctuation are ignored; every word must match."""
    assert exact_match(output, reference) == score


@pytest.mark.parametrize(
    ("output", "reference", "score"),
    [
        ("", "", 1.0),
        ("", "a b", 0.0),
        ("a b", "", 0.0),
        ("a c b", "a b c", 2 / 3),  # a subsequence, not a set
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(output: str, reference: str, score: float) -> None:
    """Values computed by hand, including empty texts."""
    assert rouge_l(output, reference) == pytest.approx(score)


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
