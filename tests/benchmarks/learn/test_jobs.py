"""Runs in their own processes: none is made twice, none is lost with another; searches use development records."""

import fcntl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest

from benchmarks.learn import jobs as module
from benchmarks.learn import search as searching
from benchmarks.learn.jobs import BUSY, RunConditions, RunJob, Worker, jobs_of, make_run, make_runs, read_plan
from benchmarks.learn.methods import METHODS, read_profile
from benchmarks.learn.search import LR, SEED, Search, Trial, beyond, refine
from streamlearn.errors import UsageError

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{}')"
FAILS = "import sys; sys.stderr.write('x' * 200_000 + '\\nOutOfMemory: the end\\n'); sys.exit(7)"
SCRIPTS = {"gem": FAILS, "busy": f"import sys; sys.exit({BUSY})"}


def job(out: Path, method: str = "lora") -> RunJob:
    return RunJob("trace", method, 0, RunConditions((), str(out), records=1, evaluated=1))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the worker by a script that writes an empty result, or does what `SCRIPTS` says; collects the methods."""
    methods: list[str] = []

    def start(job: RunJob, threads: int) -> Worker:
        methods.append(job.method)
        job.file.parent.mkdir(parents=True, exist_ok=True)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the run
        command = [sys.executable, "-c", SCRIPTS.get(job.method, WRITES), str(job.file)]
        return Worker(job, subprocess.Popen(command, stderr=errors), errors)

    monkeypatch.setattr(module, "start", start)
    return methods


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, started: list[str]) -> None:
    """Its error is told and kept next to its result; the next call makes only the failed run again."""
    jobs = [job(tmp_path, method) for method in ("gem", "lora", "er")]
    lines: list[str] = []
    assert make_runs(jobs, side_by_side=1, tell=lines.append) == jobs[:1]
    assert started == ["gem", "lora", "er"]
    assert any("trace  gem  seed 0  failed with exit code 7" in line for line in lines)
    assert jobs[0].error.read_text().endswith("OutOfMemory: the end\n")
    assert make_runs(jobs, side_by_side=1, tell=lines.append) == jobs[:1]
    assert started[3:] == ["gem"]


def test_a_run_in_progress_is_left_to_its_process(tmp_path: Path, started: list[str]) -> None:
    """It is neither made nor failed: the worker found the lock of another process."""
    assert make_runs([job(tmp_path, "busy")], side_by_side=1, tell=lambda _: None) == []
    assert started == ["busy"]
    held = job(tmp_path)
    with held.running.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert make_run(held) == BUSY
    held.file.write_text("{}")
    assert make_run(held) == 0
    assert held.file.read_text() == "{}"


def test_a_plan_makes_each_run_once(tmp_path: Path) -> None:
    """In its order; methods are all if absent; what is unknown is named."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {suites: [long], methods: [er, lora], seeds: [4, 0]}\n- {suites: [long], seeds: [0]}\n")
    conditions = RunConditions(("data",), str(tmp_path))
    jobs = jobs_of(read_plan(plan), conditions)
    assert [(one.method, one.seed) for one in jobs[:4]] == [("er", 4), ("lora", 4), ("er", 0), ("lora", 0)]
    assert len(jobs) == 2 + len(METHODS)
    for text, message in (
        ("- {suites: [nowhere], methods: [er], seeds: [0]}", "expected a folder or one of superni-1"),
        ("- {suites: [long], methods: [best], seeds: [0]}", "--method best: unknown; expected one of streamlearn"),
        ("- {suites: [long], seeds: [a]}", "part 1: seeds must be a list of int"),
        ("- {suits: [long]}", "part 1: expected suites, methods and seeds"),
        ("a: b", "expected a list of parts, found dict"),
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
        assert not any(map(make_run, jobs))
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
