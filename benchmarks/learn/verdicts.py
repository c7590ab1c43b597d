"""Verdicts on what is claimed of the default method, from the 95 % intervals of the differences.

A difference is the other method's figure less the default's, on the same test records and seeds. `low` and `high` are
the ends of its interval.

| claim | holds | does not hold |
|---|---|---|
| the default has more of a figure | high < 0 | low > 0 |
| the default has at most `MARGIN` less of it | high < MARGIN | low > MARGIN |

Otherwise these records do not decide. That an interval contains zero never shows that two methods are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from benchmarks.learn.methods import METHODS
from benchmarks.learn.run_files import BLIND, FROZEN
from benchmarks.learn.skill import CEILINGS

MARGIN = 0.02
"""Largest difference in a mean score that counts as none: one test record in fifty."""
CONTROL = "lora-per-regime"
NOT_BASELINES = frozenset({"streamlearn", "streamlearn-routed", "streamlearn-told", BLIND, FROZEN, CONTROL, *CEILINGS})
BASELINES = tuple(name for name in METHODS if name not in NOT_BASELINES)
"""Methods that learn the stream in its order, and of which the default claims to forget less."""
LORA = ("lora",)
OF_ABLATIONS = ("AP", "BWT")
"""Figures that decide on an ablation."""
ALPHA = 0.05
"""Share of intervals that exclude the true difference."""

Json = Mapping[str, Any]


class Verdict(StrEnum):
    """What the intervals show of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not decided by these records"


class Effect(StrEnum):
    """What the intervals show of a mechanism or a choice of the default, which an ablation removes or changes."""

    EARNS = "earns"
    NONE = "no measurable effect"
    COSTS = "costs"
    BOTH = "earns in one figure, costs in the other"


def is_more(difference: Json) -> Verdict:
    """Decide whether the default has more of a figure."""
    return _decide(difference, 0.0)


def is_not_less(difference: Json) -> Verdict:
    """Decide whether the default has at most `MARGIN` less of a figure."""
    return _decide(difference, MARGIN)


def effect(differences: Json) -> Effect:
    """Decide whether the default has a higher AP or a higher BWT than the ablation."""
    known = [differences[figure] for figure in OF_ABLATIONS if differences[figure] is not None]
    earns, costs = any(each["high"] < 0 for each in known), any(each["low"] > 0 for each in known)
    if earns and costs:
        return Effect.BOTH
    return Effect.EARNS if earns else Effect.COSTS if costs else Effect.NONE


def verdicts(summary: Json) -> dict[str, Any]:
    """Return `{"claims": [...], "ablations": [...], "comparisons": number of intervals}` of a suite's summary.

    Each claim has its statement and its cases: the method compared with, the figure, the difference and the verdict.
    """
    claims = [
        _claim(summary, "streamlearn forgets less than each baseline", "BWT", BASELINES, is_more),
        _claim(summary, f"AP of streamlearn is at most {MARGIN} below each ceiling's", "AP", CEILINGS, is_not_less),
        _claim(summary, f"learning accuracy of streamlearn is at most {MARGIN} below lora's", "LA", LORA, is_not_less),
        _claim(summary, "AP of streamlearn is higher than that of one LoRA per regime", "AP", (CONTROL,), is_more),
    ]
    ablations = [
        {"ablation": name, "of": row["of"], "differences": row["differences"], "effect": effect(row["differences"])}
        for name, row in summary["ablations"].items()
        if row["differences"]["AP"] is not None
    ]
    known = [each for case in ablations for each in map(case["differences"].get, OF_ABLATIONS) if each is not None]
    number = sum(len(claim["cases"]) for claim in claims) + len(known)
    return {"claims": claims, "ablations": ablations, "comparisons": number, "expected_by_chance": number * ALPHA}


def _decide(difference: Json, margin: float) -> Verdict:
    if difference["high"] < margin:
        return Verdict.HOLDS
    return Verdict.FAILS if difference["low"] > margin else Verdict.OPEN


def _claim(
    summary: Json, statement: str, figure: str, methods: Sequence[str], decide: Callable[[Json], Verdict]
) -> dict[str, Any]:
    rows = summary["methods"]
    differences = {name: rows[name]["differences"][figure] for name in methods if name in rows}
    cases = [
        {"against": name, "figure": figure, "difference": difference, "verdict": decide(difference)}
        for name, difference in differences.items()
        if difference is not None
    ]
    return {"statement": statement, "cases": cases, "missing": [name for name in methods if not differences.get(name)]}
