"""The Grafana dashboard: its expressions parse, its metrics exist, and its panels can be read."""

from pathlib import Path

import pytest
import yaml

from streamlearn.cli.metrics_reference import daemon_registry, families
from tests.monitoring.files import DASHBOARD, dashboard, expressions, metric_names, panels
from tests.monitoring.promtool import promtool

EXPRESSIONS = list(expressions("127.0.0.1:8083", "1m"))
SUFFIXES = ("_bucket", "_sum", "_count")


def test_every_expression_parses(tmp_path: Path) -> None:
    """Each as a recording rule."""
    recorded = [{"record": f"panel:{number}", "expr": text} for number, (_, text) in enumerate(EXPRESSIONS)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    assert f"SUCCESS: {len(EXPRESSIONS)} rules found" in promtool("check", "rules", file)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_every_expression_reads_metrics_that_exist(title: str, expression: str) -> None:
    """The series of a histogram have suffixes of their own."""
    kinds = {name: kind for name, kind, *_ in families(daemon_registry())}
    histograms = {name + suffix for name, kind in kinds.items() if kind == "histogram" for suffix in SUFFIXES}
    named = metric_names(expression)
    assert named or "ALERTS" in expression
    assert named <= kinds.keys() - {name for name, kind in kinds.items() if kind == "histogram"} | histograms


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_explains_itself(panel: dict[str, object]) -> None:
    """With a title, a sentence, a unit and a legend for each of several lines."""
    assert str(panel["description"]).endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]  # type: ignore[index]
    targets = panel["targets"]
    assert isinstance(targets, list)
    assert len(targets) == 1 or all(target["legendFormat"] for target in targets)


def test_panels_do_not_overlap() -> None:
    """Each cell of the 24 columns belongs to one panel, and ids are unique."""
    everything = dashboard()["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in everything)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in everything}) == len(everything)


def test_the_file_can_be_read_by_people() -> None:
    """It is written by hand, not exported."""
    assert len(DASHBOARD.read_text(encoding="utf-8").splitlines()) < 300
