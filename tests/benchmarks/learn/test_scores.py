"""Scores, calculated by hand."""

from typing import Any

import pytest

from benchmarks.learn.scores import (
    WITHIN,
    detection_scores,
    normalized_mutual_information,
    rouge_l,
    sari,
    scores,
    stream_scores,
)


def a_run(**changes: Any) -> dict[str, Any]:
    """Segments a, b, c with 60, 20 and 20 records; u is never trained on."""

    def known(**accuracies: float) -> dict[str, Any]:
        return {task: {"accuracy": accuracy, "loss": 2 * accuracy} for task, accuracy in accuracies.items()}

    return {
        "segments": [{"tasks": [task], "records": n} for task, n in (("a", 60), ("b", 20), ("c", 20))],
        "unseen": ["u"],
        "answers": {
            "a": {"after": [1.0, 0.5], "end": [0.0, 0.5]},
            "b": {"after": [0.5, 0.0], "end": [1.0, 0.0]},
            "c": {"after": [0.75, 0.75], "end": [0.75, 0.75]},
            "u": {"after": None, "end": [0.0, 0.25]},
        },
        "teacher": [
            known(a=0.5, b=0.25),
            known(b=0.5, c=0.5),
            known(a=0.25, b=0.5, c=0.75, u=0.125),
        ],
        "record_losses": [3.0] * 50 + [1.0] * 10 + [2.0] * 20 + [1.0] * 20,
        "shuffled": False,
        **changes,
    }


FROZEN = a_run(teacher=[{task: {"accuracy": 0.125, "loss": 3.0} for task in "abcu"}] * 3)


def test_the_scores_are_those_of_their_equations() -> None:
    """A and b ended before the last segment; b's gain is no negative forgetting."""
    found = scores(a_run(), FROZEN)
    assert pytest.approx((0.25 + 0.5 + 0.75) / 3) == found.AP
    assert pytest.approx((0.75 + 0.25 + 0.75) / 3) == found.LA
    assert pytest.approx((0.5 + 0) / 2) == found.AF
    assert pytest.approx((-0.5 + 0.25) / 2) == found.BWT
    assert pytest.approx(0.125) == found.ZST
    assert pytest.approx((0.125 + 0.375) / 2) == found.FWT
    assert (found.token_AP, found.token_loss) == (0.5, 1.0)
    assert pytest.approx((150 + 10 + 40 + 20) / 100) == found.prequential_loss
    assert pytest.approx((3 + 2 + 1) / 3) == found.first_50_loss


def test_forgetting_is_a_difference_by_one_metric() -> None:
    """`end_as_after` is the end by the metric of `after`; AP is by the other."""
    run = a_run()
    run["answers"]["a"]["end_as_after"] = [1.0, 0.5]
    found = scores(run)
    assert found.AF == 0
    assert pytest.approx(0.25 / 2) == found.BWT
    assert pytest.approx((0.25 + 0.5 + 0.75) / 3) == found.AP


def test_rouge_l_is_that_of_the_package_with_its_stemmer() -> None:
    """The package would score Chinese 0; accents in English do not matter."""
    assert rouge_l("He was running.", "he is running") == pytest.approx(2 / 3)
    assert rouge_l("the cats' houses", "the cat's house") == pytest.approx(4 / 7 * 3 / 2)
    assert [rouge_l(*pair) for pair in (("巴黎 3", "巴黎 3"), ("", "巴黎"), ("", "a"))] == [1.0, 0.0, 0.0]
    assert rouge_l("café bar", "café bar") == 1.0


def test_a_shuffled_stream_has_no_tasks_in_order() -> None:
    """No learning accuracy, forgetting or transfer, and no segments' first records."""
    answers = {task: {**each, "after": None} for task, each in a_run()["answers"].items()}
    found = scores(a_run(answers=answers, shuffled=True), FROZEN)
    assert found.AP is not None
    assert (found.LA, found.AF, found.BWT, found.FWT, found.first_50_loss) == (None, None, None, None, None)


def test_what_was_not_measured_is_none() -> None:
    """A run without answers, and one segment."""
    found = scores(a_run(answers={}, record_losses=[]))
    assert (found.AP, found.LA, found.AF, found.ZST, found.FWT, found.prequential_loss) == (None,) * 6
    one = a_run(segments=[{"tasks": ["a"], "records": 60}], teacher=[{"a": {"accuracy": 0.5, "loss": None}}])
    assert scores({**one, "answers": {"a": {"after": [1.0], "end": [1.0]}}, "unseen": []}).AF is None
    assert scores({**one, "answers": {}}).token_loss is None


def run(declared: list[int], records: list[int], known: tuple[int, ...] = ()) -> dict[str, Any]:
    """A run with input shifts declared at these records, and one of the answers."""
    shifts = [{"kind": "inputs", "declared_at": at, "known": at in known} for at in declared]
    shifts.append({"kind": "answers", "declared_at": 7, "known": False})
    return {
        "segments": [{"tasks": [f"t{i}"], "records": number} for i, number in enumerate(records)],
        "detection": {"shifts": [{"shift": shift} for shift in shifts]},
    }


@pytest.mark.parametrize(
    ("declared", "records", "expected"),
    [
        ([1, 205, 210, 300], [200, 200, 50], (1, 2)),  # a second shift after a boundary is false
        ([1, 200 + WITHIN], [200, 100], (1, 0)),
        ([1, 201 + WITHIN], [200, 100], (0, 1)),
        ([1, 200], [200, 100], (0, 1)),
        ([1, 65, 70], [30, 30, 30], (1, 1)),  # a shift after the next boundary detects that one
    ],
)
def test_a_shift_within_reach_detects_one_boundary(
    declared: list[int], records: list[int], expected: tuple[int, int]
) -> None:
    """The declaration at record 1 does not count."""
    found = detection_scores(run(declared, records))
    assert (found["boundaries_found"], found["false_shifts"]) == expected


def test_segments_of_the_same_tasks_have_no_boundary() -> None:
    """A shift in the middle of a mixture is neither right nor false."""
    uncut = run([1, 205], [200, 200])
    for segment in uncut["segments"]:
        segment["tasks"] = ["a", "b"]
    assert set(detection_scores(uncut).values()) == {None}


def test_losses_of_an_uncut_stream_are_weighted_by_tokens() -> None:
    """Task a stopped; its loss was lowest after the second of three segments, and nothing was evaluated in one."""

    def row(a: float, b: float) -> dict[str, dict[str, float]]:
        return {"a": {"loss": a, "tokens": 10}, "b": {"loss": b, "tokens": 30}}

    uncut = {
        "segments": [{"tasks": ["a", "b"], "records": 20}] * 4,
        "last_records": {"a": 60, "b": 80},
        "teacher": [row(3.0, 3.0), row(1.0, 2.0), {}, row(2.0, 1.0)],
        "record_losses": [3.0] * 40 + [1.0] * 40,
        "detection": {"regimes": [1] * 30 + [3] * 50, "nmi": 0.5},
    }
    assert stream_scores(uncut) == {
        "loss": pytest.approx((20 + 30) / 40),
        "prequential_loss": 2.0,
        "stopped": 2.0,
        "forgotten": 1.0,
        "regimes": 2,
        "nmi": 0.5,
    }
    told = stream_scores({**uncut, "last_records": {"a": 61, "b": 80}, "detection": None})
    assert [told[name] for name in ("stopped", "forgotten", "regimes", "nmi")] == [None] * 4


@pytest.mark.parametrize(("left", "expected"), [("aabb", 1.0), ("1111", 0.0), ("xyxy", 0.0), ("1233", 0.8)])
def test_mutual_information_is_normalized(left: str, expected: float) -> None:
    """1 for the same partition under other names, 0 for independent ones."""
    assert normalized_mutual_information(left, [1, 1, 2, 2]) == pytest.approx(expected)
    assert normalized_mutual_information("aa", "bb") == 0.0


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
