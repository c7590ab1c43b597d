"""The report on a stream that nobody cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn.report import report
from streamlearn.errors import UsageError
from tests.benchmarks.learn.kit import a_run, write

YEAR_S = 366 * 24 * 3600
TOKENS = 10
A_YEAR = 8
ERAS_OF_FROZEN = {"1970 to 1971": 2.5, "1972 to 1973": 2.25, "1974 to 1975": 1.75, "1976 to 1977": 1.5}


def a_natural_run(method: str, seed: int = 0, *, a: Sequence[float], b: Sequence[float], **changes: Any) -> Any:
    """A run on 80 records of two writers, of whom `a` stops; their losses by scored record at the end.

    After the first segment every record had a loss of 2. A year's scored records, equal ones, are of one writer; the
    writers alternate from 1970 on.
    """

    def row(losses: dict[str, Sequence[float]]) -> dict[str, Any]:
        return {
            writer: {
                "loss": sum(own) / len(own),
                "tokens": TOKENS * len(own) * A_YEAR,
                "records": [[TOKENS * loss, TOKENS] for loss in own for _ in range(A_YEAR)],
            }
            for writer, own in losses.items()
        }

    return a_run(
        method,
        seed,
        suite="natural",
        segments=[{"tasks": ["a", "b"], "records": 40}] * 2,
        unseen=[],
        answers={},
        times={
            "stream": [*range(80)],
            "scored": {
                writer: [(2 * i + first) * YEAR_S for i in range(4) for _ in range(A_YEAR)]
                for first, writer in enumerate("ab")
            },
        },
        last_records={"a": 40, "b": 80},
        teacher=[row({"a": [2.0] * 4, "b": [2.0] * 4}), row({"a": a, "b": b})],
        record_losses=[] if method == "frozen" else [3.0] * 40 + [2.0] * 40,
        detection={"regimes": [1] * 40 + [2] * 40, "nmi": 1.0} if method == "streamlearn" else None,
        config={"learner": {"lr": 0.002}},
        **changes,
    )


def test_losses_are_compared_record_by_record(tmp_path: Path) -> None:
    """A method that is worse by the same on every record has an interval without width; writers and eras add up."""
    pytest.importorskip("matplotlib")
    runs = [
        a_natural_run("frozen", a=[4.0] * 4, b=[4.0] * 4),
        a_natural_run("streamlearn", a=[2.0, 2.5, 2.5, 3.0], b=[1.0, 1.0, 2.0, 2.0]),
        a_natural_run("streamlearn", 1, a=[2.0, 2.5, 2.5, 3.0], b=[1.0, 1.0, 2.0, 2.0]),
        a_natural_run("joint", a=[2.0] * 4, b=[1.0] * 4, shuffled=True),
        a_natural_run("lora", a=[2.5, 3.0, 3.0, 3.5], b=[1.5, 1.5, 2.5, 2.5]),
    ]
    assert report(write(tmp_path / "runs", *runs), tmp_path / "out") == ["natural"]
    summary = orjson.loads((tmp_path / "out/natural.json").read_bytes())
    own, lora, frozen = (summary["methods"][name] for name in ("streamlearn", "lora", "frozen"))
    assert own["loss"]["value"] == pytest.approx(2.0)
    assert own["loss"]["low"] < 2.0 < own["loss"]["high"]
    assert set(own["less_default"].values()) == {None}
    assert lora["less_default"]["all"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5, "seeds": 1})
    less = {part: estimate["value"] for part, estimate in frozen["less_default"].items()}
    assert less == pytest.approx({"all": 2.0, "writers that went on": 2.5, "a": 1.5, "b": 2.5, **ERAS_OF_FROZEN})
    assert frozen["less_default"]["all"]["low"] < frozen["less_default"]["all"]["high"]
    assert own["writers"] == pytest.approx({"a": 2.5, "b": 1.5})
    assert own["eras"] == pytest.approx(
        {"1970 to 1971": 1.5, "1972 to 1973": 1.75, "1974 to 1975": 2.25, "1976 to 1977": 2.5}
    )
    assert (own["stopped"], own["forgotten"], lora["forgotten"]) == (2.5, 0.5, 1.0)
    assert (own["regimes"], own["nmi"], lora["regimes"], own["seeds"]) == (2, 1.0, None, [0, 1])
    joint = summary["methods"]["joint"]
    assert (joint["prequential"], joint["forgotten"]) == (None, None)
    assert (own["prequential"], frozen["prequential"]) == (2.5, None)
    text = (tmp_path / "out/natural.md").read_text()
    assert "| **streamlearn** | 0.002 | 2.000 [" in text
    assert "| method | a (50%) | b (100%) |" in text
    assert "| writers that went on | +2.500 [" in text
    assert (tmp_path / "out/natural.png").exists()


def test_blind_has_no_losses_to_report(tmp_path: Path) -> None:
    runs = write(tmp_path, a_natural_run("blind", a=[1.0] * 4, b=[1.0] * 4) | {"record_losses": []})
    with pytest.raises(UsageError, match="blind"):
        report(runs, tmp_path / "out")
