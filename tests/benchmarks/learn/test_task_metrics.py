"""The metric of each task, and its value."""

import pytest

from benchmarks.learn.suite import Metric, Reference
from benchmarks.learn.suites import ORDER_1, TRACE, UNSEEN_1
from benchmarks.learn.task_metrics import _METRICS, MAX_LABELS, choice, metric_of, score_answer


def test_every_task_of_a_named_suite_has_its_papers_metric() -> None:
    """Labels, choices, texts, code and simplifications."""
    assert {*_METRICS} == {*ORDER_1, *UNSEEN_1, *TRACE}
    found = {task: metric_of(task, []) for task in TRACE}
    assert found == {
        "C-STANCE": "choice",
        "FOMC": "choice",
        "MeetingBank": "rouge_l",
        "Py150": "edit_similarity",
        "ScienceQA": "choice",
        "NumGLUE-cm": "exact_match",
        "NumGLUE-ds": "exact_match",
        "20Minuten": "sari",
    }
    assert metric_of("task1687_sentiment140_classification", []) == "exact_match"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["yes", "no"] * 3, "exact_match"),
        (["yes", "no", "maybe"] * 2, "rouge_l"),
        ([f"{i % (MAX_LABELS + 1)}" for i in range(100)], "rouge_l"),
        ([], "rouge_l"),
    ],
)
def test_an_unknown_task_with_few_answers_has_labels(answers: list[str], expected: Metric) -> None:
    """At most twelve different answers, with three training answers per label."""
    assert metric_of("mine", answers) == expected if answers else True


@pytest.mark.parametrize(
    ("metric", "output", "answers", "expected"),
    [
        ("exact_match", "Positive.", ("positive",), 1.0),
        ("exact_match", "18.7", ("18.71",), 0.0),
        ("choice", "B. because", ("B\nAll solids",), 1.0),
        ("choice", "", ("B",), 0.0),
        ("rouge_l", "the cat sat", ("a dog", "the cat sat"), 1.0),
        ("edit_similarity", "x = <STR_LIT:a>", ("x = a",), 1.0),
        ("edit_similarity", "x = <STR_LIT>", ("x =",), 1.0),
        ("edit_similarity", "ab", ("ac",), 0.5),
    ],
)
def test_the_best_reference_counts(metric: Metric, output: str, answers: tuple[str, ...], expected: float) -> None:
    """Scores are in [0, 1]."""
    assert score_answer(metric, output, Reference(answers)) == pytest.approx(expected)


def test_sari_is_given_the_source() -> None:
    """Copying the source is not a perfect simplification."""
    reference = Reference(("the cat sat",), "the old cat sat down")
    assert score_answer("sari", "the cat sat", reference) == pytest.approx(1)
    assert score_answer("sari", "the old cat sat down", reference) < 1


def test_an_empty_answer_chooses_nothing() -> None:
    """Not even an empty reference."""
    assert choice("", "") == 0.0
