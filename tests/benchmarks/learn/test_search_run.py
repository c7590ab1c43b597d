"""A small search from end to end: real runs on the tiny backbone, made by the worker in this process."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest

from benchmarks.learn import search as searching
from benchmarks.learn import search_trials, worker
from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.processes import Outcome
from benchmarks.learn.profile import read_profile
from benchmarks.learn.search import SEED, Search
from benchmarks.learn.search_table import write_search
from benchmarks.learn.search_trials import LR

STRENGTH = "baseline.strength"


@pytest.fixture
def make_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[RunJob]], Outcome]:
    """Make runs in this process: a process each would spend its time on imports."""

    def make(jobs: Sequence[RunJob]) -> Outcome:
        for job in jobs:
            monkeypatch.setattr(sys, "argv", ["worker", job.to_json()])
            worker.main()
        return Outcome(list(jobs), [], [])

    return make


def test_a_search_writes_a_profile_that_runs_use(
    tmp_path: Path,
    tiny_profile_file: Path,
    write_tasks: Callable[..., Path],
    make_runs: Callable[[Sequence[RunJob]], Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test files may be absent; a run with the profile has the chosen values."""
    folder = write_tasks("fox", "dog")
    for file in folder.glob("*.test.jsonl.gz"):
        file.unlink()
    monkeypatch.setattr(searching, "PROMPTS", ("plain",))
    monkeypatch.setattr(search_trials, "RATES", (1e-3, 1e-2))
    monkeypatch.setattr(search_trials, "FACTORS", (0.5,))
    monkeypatch.setattr(searching, "BEYOND", 0)
    conditions = RunConditions((folder,), tmp_path / "search", str(tiny_profile_file), records=8, evaluated=3)
    found = Search(str(folder), ("lora", "ewc"), conditions, make_runs).run()

    assert set(found.profile.methods) == {"lora", "ewc"}
    assert [len(found.trials[method]) for method in ("lora", "ewc")] == [3, 6]
    assert found.profile.source["seed"] == SEED
    runs = [orjson.loads(file.read_bytes()) for file in (tmp_path / "search").rglob(f"*.{SEED}.json")]
    assert len(runs) == 2 * 2 + 3 + 6 - 1, "two setups, and lora at the rate of stage 0 is a trial of stage 1"
    assert {run["split"] for run in runs} == {"development"}
    assert all([*map(bool, run["teacher"])] == [False, True] for run in runs), "scored at the end only"
    assert all(answers["after"] is None for run in runs for answers in run["answers"].values())
    rates = {run["config"]["learner"]["lr"] for run in runs if run["method"] == "ewc"}
    assert rates == {trial.own[LR] for trial in found.trials["ewc"]}
    assert {run["options"][key] for run in runs for key in run["options"]} >= {0.001, 0.01, 0.1, 1.0}

    write_search(found, tmp_path / "search.md")
    (tmp_path / "chosen.json").write_bytes(found.profile.to_json())
    chosen = read_profile(str(tmp_path / "chosen.json"))
    assert chosen.methods == found.profile.methods
    again = RunConditions((folder,), tmp_path / "runs", str(tmp_path / "chosen.json"), split="development")
    job = again.job(str(folder), "ewc", 0)
    make_runs([job])
    made = orjson.loads(job.file.read_bytes())
    assert made["config"]["learner"]["lr"] == chosen.methods["ewc"][LR]
    assert made["options"].get("strength") == chosen.methods["ewc"].get(STRENGTH)

    made = len(runs)
    Search(str(folder), ("lora", "ewc"), conditions, make_runs).run()
    assert len(list((tmp_path / "search").rglob(f"*.{SEED}.json"))) == made, (
        "all trials are taken: their arms are the same"
    )
