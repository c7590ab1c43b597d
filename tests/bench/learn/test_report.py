"""The report: tables, plots and the page."""

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from streamlearn.bench.learn.report import report
from streamlearn.errors import UsageError
from tests.bench.learn.runs import a_run, write


def test_the_table_of_ablations_has_signs(tmp_path: Path) -> None:
    """Ablations have their own table and plot."""
    pytest.importorskip("matplotlib")
    runs = [a_run("streamlearn", 0, ap=0.4), a_run("no bias", 0, ap=0.5), a_run("heads 1", 0, ap=0.25)]
    report(write(tmp_path / "runs", *runs), tmp_path / "out", Console(file=io.StringIO()))
    text = (tmp_path / "out" / "two.md").read_text()
    assert "| no bias | streamlearn | 0.500 | 0.100 | +0.100 | +0.000 |" in text
    assert "| heads 1 | streamlearn | 0.250 | 0.100 | -0.150 | +0.000 |" in text
    assert (tmp_path / "out" / "two-ablations.png").exists()
    assert "<td>+0.100</td>" in (tmp_path / "out" / "index.html").read_text()


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Different tests, or no runs at all: the message names the suite and the difference."""
    with pytest.raises(UsageError, match=r"expected runs SUITE/METHOD\.SEED\.json, found none"):
        report(tmp_path, tmp_path, Console(file=io.StringIO()))
    write(tmp_path, a_run("lora", 0), a_run("lora", 1, tests={"a": 3, "b": 2}))
    with pytest.raises(UsageError, match="must be equal in tests"):
        report(tmp_path, tmp_path, Console(file=io.StringIO()))


def test_the_report_has_tables_plots_and_a_page(tmp_path: Path) -> None:
    """The figures of the summary appear in the tables and on the page."""
    pytest.importorskip("matplotlib")
    runs = write(tmp_path / "runs", a_run("streamlearn", 0), a_run("lora", 0, ap=0.25, experts=None, detection=None))
    out = tmp_path / "out"
    report(runs, out, Console(file=io.StringIO()))
    assert orjson.loads((out / "two.json").read_bytes())["methods"]["lora"]["AP"]["mean"] == 0.25
    assert "| lora | 0.250 |" in (out / "two.md").read_text()
    page = (out / "index.html").read_text()
    assert "<td>0.250</td>" in page
    plots = {file.name for file in out.glob("*.png")}
    assert plots == {f"two-{name}.png" for name in ("forgetting", "matrices", "stream", "experts")}
    assert all(f'src="{name}"' in page for name in plots)
