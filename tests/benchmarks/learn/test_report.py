"""The report: tables, plots and the page."""

import io
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from benchmarks.learn.methods import METHODS
from benchmarks.learn.profile import Profile
from benchmarks.learn.report import report
from benchmarks.learn.single_run import run_method
from benchmarks.learn.splits import Draw
from benchmarks.learn.suites import sequential
from streamlearn.errors import UsageError
from tests.benchmarks.learn.runs import a_run, drawn, write


class PageReader(HTMLParser):
    """Tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every such tag."""
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a suite with every kind of method."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("report")
    size = {"num_tasks": 3, "num_unseen": 1, "records": 10}
    runs = [drawn(name, seed, 0.6, 0.1, **size) for name in ("streamlearn", "lora") for seed in (0, 1)]
    runs += [
        drawn("blind", 0, 0.1, 0.0, record_losses=[], **size),
        drawn("frozen", 0, 0.2, 0.0, record_losses=[], **size),
    ]
    runs += [drawn("joint", 0, 0.7, 0.0, shuffled=True, **size), drawn("heads 1", 0, 0.4, 0.1, **size)]
    report(write(folder / "runs", *runs), folder / "out", Console(file=io.StringIO()))
    return folder / "out"


def test_figures_of_the_summary_are_in_the_tables_and_on_the_page(out: Path) -> None:
    summary = orjson.loads((out / "eight.json").read_bytes())
    AP = f"{summary['methods']['joint']['figures']['AP']['mean']:.3f}"
    assert f"| joint (ceiling) | {AP} |" in (out / "eight.md").read_text()
    assert f'<th scope="row">joint (ceiling)</th><td>{AP}</td>' in (out / "index.html").read_text()


def test_every_plot_is_on_the_page_with_a_text(out: Path) -> None:
    """The alternative text is not the file's name."""
    plots = {file.name for file in out.glob("*.png")}
    assert plots == {f"eight-{name}.png" for name in ("forgetting", "tasks", "stream", "ablations")}
    images = PageReader((out / "index.html").read_text()).of("img")
    assert {image["src"] for image in images} == plots
    assert all("tiny-model" in (image["alt"] or "") for image in images)


def test_the_page_is_accessible(out: Path) -> None:
    """It names its language, scales to a phone's width, has a dark mode, and its tables have captions and headers."""
    text = (out / "index.html").read_text()
    page = PageReader(text)
    assert page.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert "prefers-color-scheme:dark" in text
    assert len(page.of("caption")) == len(page.of("table")) > 0
    assert {head.get("scope") for head in page.of("th")} == {"col", "row"}
    assert not page.of("script")
    assert {link["href"] for link in page.of("a")} == {"#eight"}


def test_a_suite_without_the_compared_methods_has_fewer_plots(tmp_path: Path) -> None:
    """One method that learns nothing in order: no plot of forgetting, of tasks or of the stream."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    report(write(tmp_path / "runs", a_run("blind", record_losses=[])), out, Console(file=io.StringIO()))
    assert not list(out.glob("*.png"))
    assert "there is no run of a ceiling" in (out / "two.md").read_text()


def test_the_report_reads_what_a_run_writes(
    write_tasks: Callable[..., Path], tiny_profile: Profile, tmp_path: Path
) -> None:
    """Whole runs on a tiny backbone; blind answers every question right, so that skill is undefined."""
    pytest.importorskip("matplotlib")
    suite = sequential("real", Draw([write_tasks("fox", "dog", "owl")], 12, 4), ("fox", "dog"), ("owl",))
    names = ("blind", "frozen", "streamlearn", "lora", "joint")
    runs = write(tmp_path / "runs", *(run_method(suite, name, METHODS[name], 0, tiny_profile) for name in names))
    report(runs, tmp_path / "out", Console(file=io.StringIO()))
    summary = orjson.loads((tmp_path / "out" / "real.json").read_bytes())
    assert list(summary["methods"]) == list(names)
    assert summary["methods"]["blind"]["figures"]["AP"]["mean"] == 1.0
    assert "which does not exceed that of blind, 1.000" in summary["skill_scale"]["undefined"]
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {
        f"real-{name}.png" for name in ("forgetting", "tasks", "stream")
    }


def test_nothing_is_written_for_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    """Another number of scored records: the message names the run."""
    pytest.importorskip("matplotlib")
    shorter = a_run("lora", 1, end={"a": [1], "b": [1], "c": [1]}, after={"a": [1], "b": [1]})
    runs = write(tmp_path / "runs", a_run("lora", 0), shorter)
    with pytest.raises(UsageError, match="lora, seed 1, has 1 scores of exact_match for a"):
        report(runs, tmp_path / "out", Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()
