"""Worker processes: no run is made twice, and none is lost with another."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learn import processes
from benchmarks.learn.job import RunJob
from benchmarks.learn.processes import Outcome, Worker, make_runs
from benchmarks.learn.worker import BUSY

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{}')"
FAILS = "import sys; sys.stderr.write('x' * 200_000 + '\\nOutOfMemory: the end\\n'); sys.exit(7)"

SCRIPTS = {"gem": FAILS, "busy": f"import sys; sys.exit({BUSY})"}


def job(out: Path, method: str = "lora", **changes: object) -> RunJob:
    fields = {"suite": "trace", "method": method, "seed": 0, "folders": (), "records": 1, "evaluated": 1}
    return RunJob(**{**fields, "out": str(out), **changes})  # type: ignore[arg-type]


def make(*jobs: RunJob, side_by_side: int = 1) -> tuple[Outcome, str]:
    text = io.StringIO()
    return make_runs(jobs, side_by_side=side_by_side, console=Console(file=text, width=400)), text.getvalue()


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

    monkeypatch.setattr(processes, "start", start)
    return methods


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, started: list[str]) -> None:
    """Its error is printed and kept beside its result; the next call makes only the failed run again."""
    jobs = [job(tmp_path, method) for method in ("gem", "lora", "er")]
    outcome, text = make(*jobs)
    assert started == ["gem", "lora", "er"]
    assert (outcome.failed, outcome.made) == (jobs[:1], jobs[1:])
    assert "trace  gem  seed 0  failed with exit code 7" in text
    assert jobs[0].error.read_text().endswith("OutOfMemory: the end\n")
    outcome, _ = make(*jobs)
    assert (outcome.failed, outcome.made) == (jobs[:1], [])
    assert started[3:] == ["gem"]


def test_a_run_that_succeeds_leaves_no_error(tmp_path: Path, started: list[str]) -> None:
    """An earlier failure is forgotten."""
    wanted = job(tmp_path)
    wanted.error.parent.mkdir(parents=True)
    wanted.error.write_text("before")
    outcome, _ = make(wanted)
    assert outcome.made == [wanted]
    assert [path.name for path in wanted.file.parent.iterdir()] == ["lora.0.json"]


def test_a_run_in_progress_is_left_to_its_process(tmp_path: Path, started: list[str]) -> None:
    """It is neither made nor failed: the worker found the lock of another process."""
    wanted = job(tmp_path, "busy")
    outcome, text = make(wanted)
    assert "is being made by another command" in text
    assert (outcome.made, outcome.failed, outcome.busy) == ([], [], [wanted])
    assert not wanted.error.exists()


def test_a_run_is_made_once(tmp_path: Path, tiny_profile_file: Path, write_tasks: Callable[..., Path]) -> None:
    """A second call finds the result of the first."""
    folder = str(write_tasks("fox", "dog"))
    fields = {"suite": folder, "folders": (folder,), "records": 3, "evaluated": 2, "profile": str(tiny_profile_file)}
    wanted = job(tmp_path / "runs", "frozen", **fields)
    outcome, text = make(wanted)
    assert outcome.made == [wanted], text
    before = wanted.file.read_bytes()
    outcome, _ = make(wanted)
    assert outcome == Outcome([], [], [])
    assert wanted.file.read_bytes() == before
    assert [path.name for path in wanted.file.parent.iterdir()] == ["frozen.0.json"]


def test_a_termination_ends_the_runs_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are separate processes and would otherwise go on."""
    started: list[subprocess.Popen[bytes]] = []

    def start(job: RunJob, threads: int) -> Worker:
        del threads
        started.append(subprocess.Popen(["sleep", "600"]))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return Worker(job, started[-1], io.BytesIO())

    monkeypatch.setattr(processes, "start", start)
    with pytest.raises(SystemExit) as ended:
        make(job(tmp_path))
    assert ended.value.code == 128 + signal.SIGTERM
    assert [each.returncode for each in started] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
