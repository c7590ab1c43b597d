"""Verdicts follow from the intervals."""

from typing import Any

import pytest

from benchmarks.learn.summary import summarise
from benchmarks.learn.verdicts import MARGIN, Effect, Verdict, effect, is_more, is_not_less
from tests.benchmarks.learn.runs import drawn


def between(low: float, high: float) -> dict[str, Any]:
    """A difference, other less default, with this interval."""
    return {"value": (low + high) / 2, "low": low, "high": high, "seeds": 3}


def test_more_needs_an_interval_below_zero() -> None:
    """An interval that contains zero, or ends there, decides nothing."""
    assert is_more(between(-0.2, -0.1)) is Verdict.HOLDS
    assert is_more(between(0.1, 0.2)) is Verdict.FAILS
    assert [is_more(between(*each)) for each in ((-0.1, 0.1), (-0.1, 0.0), (0.0, 0.0))] == [Verdict.OPEN] * 3


def test_not_less_needs_an_interval_below_the_margin() -> None:
    """That the interval contains zero is not enough: it must exclude differences beyond the margin."""
    assert is_not_less(between(-0.01, MARGIN / 2)) is Verdict.HOLDS
    assert is_not_less(between(-0.01, 2 * MARGIN)) is Verdict.OPEN
    assert is_not_less(between(2 * MARGIN, 3 * MARGIN)) is Verdict.FAILS


@pytest.mark.parametrize(
    ("AP", "BWT", "expected"),
    [
        ((-0.2, -0.1), (-0.1, 0.1), Effect.EARNS),
        ((-0.1, 0.1), (-0.2, -0.1), Effect.EARNS),
        ((-0.1, 0.1), (-0.1, 0.1), Effect.NONE),
        ((0.1, 0.2), (-0.1, 0.1), Effect.COSTS),
        ((0.1, 0.2), (-0.2, -0.1), Effect.BOTH),
        ((0.1, 0.2), None, Effect.COSTS),
    ],
)
def test_an_ablation_shows_what_its_intervals_exclude(
    AP: tuple[float, float], BWT: tuple[float, float] | None, expected: Effect
) -> None:
    """A lower AP or BWT without the mechanism: it earns; a higher one: it costs."""
    assert effect({"AP": between(*AP), "BWT": None if BWT is None else between(*BWT)}) is expected


def test_claims_are_decided_from_the_runs() -> None:
    """A method that forgets is beaten; a method without runs is named; every interval is counted."""
    runs = [
        drawn("streamlearn", 0, 0.7, 0.0),
        drawn("lora", 0, 0.7, 0.4),
        drawn("joint", 0, 0.7, 0.0, shuffled=True),
        drawn("heads 1", 0, 0.3, 0.0),
    ]
    found = summarise(runs)["verdicts"]
    forgets, ceilings, learning, control = found["claims"]
    (case,) = forgets["cases"]
    assert (case["against"], case["figure"], case["verdict"]) == ("lora", "BWT", Verdict.HOLDS)
    assert [each["against"] for each in ceilings["cases"]] == ["joint"]
    assert ceilings["missing"] == ["lora-per-task", "joint-3"]
    assert [each["against"] for each in learning["cases"]] == ["lora"]
    assert (control["cases"], control["missing"]) == ([], ["lora-per-regime"])
    assert [(each["ablation"], each["effect"]) for each in found["ablations"]] == [("heads 1", Effect.EARNS)]
    assert found["comparisons"] == 3 + 2
    assert found["expected_by_chance"] == pytest.approx(0.25)
