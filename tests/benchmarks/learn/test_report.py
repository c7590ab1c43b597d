"""The report: summary, tables and plots from run files."""

import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.learn.methods import METHODS, Profile
from benchmarks.learn.report import base_of, markdown, read_runs, report, summarize
from benchmarks.learn.rescore import rescored
from benchmarks.learn.run import run_method
from benchmarks.learn.suites import Draw, sequential
from streamlearn.errors import UsageError
from tests.benchmarks.learn.kit import AFTER, END, a_run, write

ARCHIVE = Path(__file__).parents[3] / "docs/evidence/runs.tar.xz"


def test_the_summary_has_means_skill_and_differences() -> None:
    """Skill is 0 for blind and 1 for the ceiling, on their seeds; a difference is the method minus streamlearn."""
    low, high = {"a": [0] * 4, "b": [0] * 4, "c": [0] * 4}, {"a": [1] * 4, "b": [1] * 4, "c": [0] * 4}
    runs = [a_run("blind", end=low), a_run("joint", end=high, shuffled=True), a_run("lora"), a_run("streamlearn")]
    runs += [a_run("lora", 1, end=high), a_run("heads 1")]
    summary = summarize(runs)
    assert summary["skill_scale"]["ceiling"] == "joint"
    methods = summary["methods"]
    assert [methods[name]["skill"] for name in ("blind", "joint", "lora")] == [0.0, 1.0, 0.5]
    assert (methods["lora"]["figures"]["AP"]["mean"], methods["lora"]["figures"]["AP"]["seeds"]) == (0.75, 2)
    assert methods["joint"]["differences"]["AP"]["value"] == 0.5
    assert methods["joint"]["figures"]["BWT"] is None
    assert (summary["ablations"]["heads 1"]["of"], base_of("cp-moe, no CKA bias")) == ("streamlearn", "cp-moe")
    text = markdown(summary)
    assert "| joint (ceiling) | 1.000 |" in text
    assert "## Ablations" in text


def test_the_report_reads_what_a_run_writes(
    write_tasks: Callable[..., Path], tiny_profile: Profile, tmp_path: Path
) -> None:
    """Whole runs on a tiny backbone, from a folder and from an archive; blind answers every question right."""
    pytest.importorskip("matplotlib")
    suite = sequential("real", Draw([write_tasks("fox", "dog", "owl")], 12, 4), ("fox", "dog"), ("owl",))
    names = ("blind", "frozen", "streamlearn", "lora", "joint")
    runs = write(tmp_path / "runs", *(run_method(suite, name, METHODS[name], 0, tiny_profile) for name in names))
    assert report(runs, tmp_path / "out") == ["real"]
    summary = orjson.loads((tmp_path / "out/real.json").read_bytes())
    assert list(summary["methods"]) == list(names)
    assert summary["methods"]["blind"]["figures"]["AP"]["mean"] == 1.0
    assert {file.name for file in (tmp_path / "out").glob("*.png")} == {"real-forgetting.png"}
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as archive:
        archive.add(runs, "some/runs")
    report(tmp_path / "runs.tar.xz", tmp_path / "again", "some/runs")
    assert (tmp_path / "again/real.md").read_text() == (tmp_path / "out/real.md").read_text()


@pytest.mark.parametrize("name", ["absent", "text"])
def test_only_a_folder_or_an_archive_is_reported_on(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UsageError, match=f"{name}: expected a folder of runs or an archive"):
        report(tmp_path / name, tmp_path / "out")


def test_the_archive_holds_the_runs_of_the_tables() -> None:
    """Every table of docs/evidence can be rebuilt from it."""
    runs = read_runs(ARCHIVE, "runs")["superni-2"]
    published = (ARCHIVE.parent / "superni-2.md").read_text(encoding="utf-8")
    assert markdown(summarize(runs)) == published


def test_runs_of_format_2_are_scored_again_as_far_as_their_texts_go(write_tasks: Callable[..., Path]) -> None:
    """What has no texts keeps its scores, beside the end by the same metric, and its columns are marked."""
    suite = sequential("two", Draw([write_tasks("a", "b", "c")], 12, 4), ("a", "b"), ("c",))
    suite = replace(suite, tasks={task: replace(own, metric="rouge_l") for task, own in suite.tasks.items()})
    run = a_run("lora")
    for answer in run["answers"].values():
        answer |= {"metric": "rouge_l", "texts": ["here", "heres", "there", ""]}
        del answer["texts_after"]
    answers = rescored(run, suite)
    assert [own["end"] for own in answers.values()] == [[1, 1, 0, 0]] * 3
    assert (answers["a"]["after"], answers["a"]["end_as_after"]) == (AFTER["a"], END["a"])
    assert "end_as_after" not in answers["c"]
    again = rescored({**run, "answers": answers}, suite)
    assert again == answers
    text = markdown(summarize([{**run, "answers": answers}]))
    assert "| AP | AP, 95 % | skill | LA ° | AF ° | BWT ° | ZST |" in text
    assert "°: from answers whose texts were not stored, so still by streamlearn's own ROUGE-L" in text
    later = rescored({**run, "answers": {t: {**own, "texts_after": own["texts"]} for t, own in answers.items()}}, suite)
    assert later["a"]["after"] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "expected a run of format 3, found 1"),
        ({"answers": {}}, "expected scores of free answers, found none"),
        ({"profile": "other"}, "must be equal in profile, found tiny in .*lora.0.json and other in .*lora.1.json"),
        ({"versions": {"commit": "x"}}, "runs of method lora must be equal in commit"),
        ({"end": {"a": [1], "b": [1], "c": [1]}, "after": {"a": [1], "b": [1]}}, "must be equal in scored records"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """Nothing is written."""
    runs = write(tmp_path / "runs", a_run("lora", 0), a_run("lora", 1, **changes))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        summarize(read_runs(runs)["two"])
