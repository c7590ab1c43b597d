"""The section "What holds": the verdicts as sentences and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.learn.tables import Summary, TextTable, estimate
from benchmarks.learn.verdicts import Effect, Verdict

TITLE = "What holds"


def sentences(summary: Summary) -> list[str]:
    """Format one sentence per claim, one on the ablations, and one on the number of comparisons."""
    found = summary["verdicts"]
    lines = [_claim(claim) for claim in found["claims"]]
    if found["ablations"]:
        lines.append(_ablations(found["ablations"]))
    return [*lines, _comparisons(summary)]


def cases_table(summary: Summary) -> TextTable | None:
    """Build the table of every comparison that a claim rests on; None without comparisons."""
    rows = [
        [
            claim["statement"],
            case["against"],
            f"d {case['figure']} {estimate(case['difference'])}",
            case["verdict"],
            f"{case['difference']['seeds']}",
        ]
        for claim in summary["verdicts"]["claims"]
        for case in claim["cases"]
    ]
    if not rows:
        return None
    notes = ["d: figure of the other method less that of streamlearn, with its 95 % interval"]
    return TextTable("Claims and their intervals", ["claim", "against", "difference", "verdict", "n"], rows, notes)


def _claim(claim: Mapping[str, Any]) -> str:
    cases, missing = claim["cases"], claim["missing"]
    by_verdict = {verdict: [c["against"] for c in cases if c["verdict"] == verdict] for verdict in Verdict}
    parts = [
        f"{verdict} against {_list(names)} ({len(names)} of {len(cases)})"
        for verdict, names in by_verdict.items()
        if names
    ]
    text = f"{_capital(claim['statement'])}: {'; '.join(parts) if parts else 'not measured'}."
    return f"{text} No comparison with {_list(missing)}: there are no runs on the same seeds." if missing else text


def _ablations(ablations: Sequence[Mapping[str, Any]]) -> str:
    by_effect = {each: [f'"{a["ablation"]}"' for a in ablations if a["effect"] == each] for each in Effect}
    parts = [f"{each}: {_list(names)}" for each, names in by_effect.items() if names]
    return f"What each ablation removes or changes, by the intervals of AP and BWT - {'; '.join(parts)}."


def _comparisons(summary: Summary) -> str:
    found, setting = summary["verdicts"], summary["setting"]
    return (
        f"These verdicts rest on {found['comparisons']} intervals of 95 %; if no method differed from another, "
        f"about {found['expected_by_chance']:.1f} of them would exclude zero by chance. The intervals cover the choice "
        f"of {setting['split']} records, for the models as trained; the spread over training seeds is in the tables."
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _capital(text: str) -> str:
    return text if text.startswith("streamlearn") else text[0].upper() + text[1:]
