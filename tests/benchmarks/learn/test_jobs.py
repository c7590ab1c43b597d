"""Runs in their own processes: a failed one stops no other; searches use development records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn import jobs as module
from benchmarks.learn import search as searching
from benchmarks.learn.jobs import RunConditions, RunJob, jobs_of, make_run, make_runs, read_plan
from benchmarks.learn.methods import METHODS, Profile, read_profile
from benchmarks.learn.search import LR, SEED, Search, Trial, beyond, refine
from benchmarks.measuring import MeasurementError
from streamlearn.errors import UsageError


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told; the next call makes only the failed run again."""
    conditions = RunConditions((), str(tmp_path), records=1, evaluated=1)
    jobs = [RunJob("trace", method, 0, conditions) for method in ("gem", "lora", "er")]
    started: list[str] = []

    def in_own_process(name: str, options: Mapping[str, Any], *, threads: int, timeout_s: None) -> dict[str, Any]:
        assert (name, threads > 0, timeout_s) == ("benchmarks.learn.jobs", True, None)
        job = RunJob.from_json(orjson.dumps(options).decode())
        started.append(job.method)
        if job.method == "gem":
            raise MeasurementError("OutOfMemory: the end")
        job.file.parent.mkdir(parents=True, exist_ok=True)
        job.file.touch()
        return {"seconds": 1.0}

    monkeypatch.setattr(module, "in_own_process", in_own_process)
    lines: list[str] = []
    assert make_runs(jobs, side_by_side=1, tell=lines.append) == jobs[:1]
    assert started == ["gem", "lora", "er"]
    assert "trace  gem  seed 0  failed: OutOfMemory: the end" in lines
    assert make_runs(jobs, side_by_side=1, tell=lines.append) == jobs[:1]
    assert started[3:] == ["gem"]


def test_a_plan_makes_each_run_once(tmp_path: Path) -> None:
    """In its order; methods are all if absent; what is unknown is named."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {suites: [long], methods: [er, lora], seeds: [4, 0]}\n- {suites: [long], seeds: [0]}\n")
    conditions = RunConditions(("data",), str(tmp_path))
    jobs = jobs_of(read_plan(plan), conditions)
    assert [(job.method, job.seed) for job in jobs[:4]] == [("er", 4), ("lora", 4), ("er", 0), ("lora", 0)]
    assert len(jobs) == 2 + len(METHODS)
    for text, message in (
        ("- {suites: [nowhere], methods: [er], seeds: [0]}", "expected a folder or one of superni-1"),
        ("- {suites: [long], methods: [best], seeds: [0]}", "--method best: unknown; expected one of streamlearn"),
        ("- {suites: [long], seeds: [a]}", "0.seeds.0"),
        ("- {suits: [long]}", "0.suits"),
        ("a: b", "expected a YAML list of parts"),
    ):
        plan.write_text(text)
        with pytest.raises(UsageError, match=message):
            jobs_of(read_plan(plan), conditions)


def test_a_search_refines_and_leaves_the_grid_at_its_edges() -> None:
    """Four rates around the best, or four strengths at it; then the next value beyond, by the last ratio."""
    trials = [Trial("er", {LR: rate}, ap, 1.0) for rate, ap in ((3e-4, 0.1), (1e-3, 0.2), (3e-3, 0.3))]
    assert refine(trials) == [{LR: 0.0015}, {LR: 0.0021}, {LR: 0.0042}, {LR: 0.006}]
    assert refine([Trial("ewc", {LR: 1e-3}, 0.2, 1.0)])[0] == {LR: 1e-3, "baseline.strength": 0.001}
    assert beyond(trials) == [{LR: 0.009}]
    assert beyond([*trials, Trial("er", {LR: 9e-3}, 0.2, 1.0)]) == []
    assert refine([Trial("er", {LR: 1e-3})]) == []


def test_a_search_around_a_profile_tries_its_rate_and_keeps_what_it_does_not_search(
    tmp_path: Path, write_tasks: Callable[..., Path]
) -> None:
    """Where the profile's rate is the best of three nothing further is tried; where it has none that is said."""
    known: Mapping[str, Mapping[str, float]] = {"ewc": {LR: 1e-3, "baseline.strength": 0.01}, "er": {LR: 2e-3}}
    file = tmp_path / "known.json"
    file.write_bytes(Profile("", "builtin:nano", methods=known).to_json())
    folder = write_tasks("fox", "dog")
    best = {5e-4: 0.1, 1e-3: 0.3, 2e-3: 0.2}

    def make(jobs: Sequence[RunJob]) -> list[RunJob]:
        for job in jobs:
            answers = {"fox": {"end": [best[job.own[LR]]]}}
            job.file.parent.mkdir(parents=True)
            losses = [{"fox": {"loss": 1.0}}]
            job.file.write_bytes(
                orjson.dumps({"segments": [{"tasks": ["fox"]}], "answers": answers, "teacher": losses})
            )
        return []

    conditions = RunConditions((), str(tmp_path / "search"), str(file), records=8)
    search = Search(str(folder), ("ewc",), conditions, make, is_around=True)
    profile = search.run()
    assert [trial.own[LR] for trial in search.trials["ewc"]] == [5e-4, 1e-3, 2e-3]
    assert profile.methods == known
    assert profile.records == 8
    assert profile.source["searched"] == ["ewc"]
    with pytest.raises(UsageError, match="expected a profile with a rate for lora, found none"):
        Search(str(folder), ("lora",), conditions, make, is_around=True)


def test_a_search_writes_a_profile_that_runs_use(
    tmp_path: Path, tiny_profile_file: Path, write_tasks: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs on the tiny backbone. Test files may be absent; a run with the profile has the chosen values."""
    folder = write_tasks("fox", "dog")
    for file in folder.glob("*.test.jsonl.gz"):
        file.unlink()
    for name, value in (("RATES", (1e-3, 1e-2)), ("FACTORS", (0.5,)), ("BEYOND", 0)):
        monkeypatch.setattr(searching, name, value)

    def make(jobs: Sequence[RunJob]) -> list[RunJob]:  # in this process: a process each would spend its time on imports
        for job in jobs:
            make_run(job)
        return []

    conditions = RunConditions((), str(tmp_path / "search"), str(tiny_profile_file), records=8, evaluated=3)
    search = Search(str(folder), ("ewc",), conditions, make)
    profile = search.run()
    assert {method: len(trials) for method, trials in search.trials.items()} == {"ewc": 6}
    runs = [orjson.loads(file.read_bytes()) for file in (tmp_path / "search").rglob(f"*.{SEED}.json")]
    assert len(runs) == 6
    assert {run["split"] for run in runs} == {"development"}
    assert all([*map(bool, run["teacher"])] == [False, True] for run in runs), "scored at the end only"
    search.write_record(tmp_path / "search.md")
    assert "| `ewc` | lr 0.001:" in (tmp_path / "search.md").read_text()
    (tmp_path / "chosen.json").write_bytes(profile.to_json())
    assert read_profile(str(tmp_path / "chosen.json")).methods == profile.methods
    chosen = RunConditions((), str(tmp_path / "runs"), str(tmp_path / "chosen.json"), split="development")
    one = RunJob(str(folder), "ewc", 0, chosen)
    make([one])
    assert orjson.loads(one.file.read_bytes())["config"]["learner"]["lr"] == profile.methods["ewc"][LR]
    other = RunConditions((), str(tmp_path / "search"), str(tiny_profile_file), records=7, evaluated=3)
    with pytest.raises(UsageError, match="holds a search from another start"):
        Search(str(folder), ("lora",), other, make)
