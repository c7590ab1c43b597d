"""The commands `bench learn` and `bench search`: from options to runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.learn import plan as planning
from benchmarks.learn import processes
from benchmarks.learn import search as searching
from benchmarks.learn.job import RunJob
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.processes import Outcome, RunFailedError
from benchmarks.learn.profile import Profile, read_profile
from benchmarks.learn.search import Found
from benchmarks.learn.search_trials import Setup, Trial
from streamlearn.cli.main import app
from streamlearn.errors import UsageError


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunJob]:
    """Collects the runs instead of making them."""
    found: list[RunJob] = []

    def make_runs(wanted: Sequence[RunJob], **_: Any) -> Outcome:
        found.extend(wanted)
        return Outcome(list(wanted), [], [])

    monkeypatch.setattr(planning, "make_runs", make_runs)
    monkeypatch.setattr(processes, "make_runs", make_runs)
    return found


def invoke(*arguments: object) -> None:
    CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def learn(tmp_path: Path, *arguments: object) -> None:
    invoke("bench", "learn", "--data", tmp_path, "--out", tmp_path / "out", *arguments)


def test_options_become_runs(tmp_path: Path, jobs: list[RunJob]) -> None:
    """Seeds follow the first one; what is not given is the profile's."""
    options = ["--suite", "trace", "--method", "lora", "--seeds", 2, "--first-seed", 5, "--split", "development"]
    learn(tmp_path, *options, "--backbone", tmp_path, "--profile", "smollm2", "--evaluated-per-task", 7)
    assert [(job.suite, job.method, job.seed) for job in jobs] == [("trace", "lora", 5), ("trace", "lora", 6)]
    job = jobs[0]
    assert (job.split, job.backbone, job.profile) == ("development", str(tmp_path), "smollm2")
    assert (job.records, job.evaluated) == (read_profile("smollm2").records, 7)


def test_all_methods_or_all_ablations(tmp_path: Path, jobs: list[RunJob]) -> None:
    """Ablations are compared with the default."""
    learn(tmp_path, "--suite", "trace", "--seeds", 1)
    assert [job.method for job in jobs] == list(METHODS)
    jobs.clear()
    learn(tmp_path, "--suite", "trace", "--seeds", 1, "--ablations")
    assert [job.method for job in jobs] == ["streamlearn", *ABLATIONS]


def test_a_plan_replaces_suites_methods_and_seeds(tmp_path: Path, jobs: list[RunJob]) -> None:
    """They cannot be given beside it, and one of them must be given."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {suites: [long], methods: [er], seeds: [4]}\n")
    learn(tmp_path, "--plan", plan)
    assert [(job.suite, job.method, job.seed) for job in jobs] == [("long", "er", 4)]
    for wrong in (["--plan", plan, "--suite", "long"], []):
        with pytest.raises(UsageError, match="give either --suite or --plan"):
            learn(tmp_path, *wrong)
    with pytest.raises(UsageError, match="--plan: names the methods itself"):
        learn(tmp_path, "--plan", plan, "--method", "er")


def test_a_search_writes_its_profile_and_tables_before_it_names_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is kept."""
    source = {"suite": "trace", "records_per_task": 9, "evaluated_per_task": 8, "seed": 100, "backbone": "tiny"}
    profile = Profile("p", "tiny", source={**source, "trials_per_method": 9, "commits": []})
    failed = RunJob("trace", "lora", 100, (), 1, 1, str(tmp_path))
    setup, trial = Setup("plain", None), Trial("lora", {"learner.lr": 0.1}, 0.5, 1.0)
    found = Found(profile, setup, {setup: [trial]}, {"lora": [trial]}, [failed])
    monkeypatch.setattr(searching.Search, "run", lambda self: found)
    out = tmp_path / "out"
    options = ["--suite", "trace", "--data", tmp_path, "--out", out, "--write", tmp_path / "new/p.json"]
    with pytest.raises(RunFailedError, match="1 of the runs failed"):
        invoke("bench", "search", *options, "--method", "lora")
    assert read_profile(str(tmp_path / "new/p.json")) == profile
    assert {path.name for path in out.iterdir()} == {"search.md", "search.json"}
