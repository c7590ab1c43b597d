"""The order of the runs, and that no run is made twice."""

import fcntl
import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from streamlearn.bench.learn import plan as planning
from streamlearn.bench.learn.job import RunJob
from streamlearn.bench.learn.plan import Plan, carry_out
from streamlearn.errors import UsageError


def plan(folder: Path, out: Path, **changes: object) -> Plan:
    values = {"suites": [str(folder)], "methods": ["frozen"], "seeds": [0], "data": [folder], "out": out}
    return Plan(**{**values, "records": 3, "tests": 2, **changes})  # type: ignore[arg-type]


def test_all_seeds_of_the_first_methods_come_before_the_others(tmp_path: Path) -> None:
    """Within them, the order is by suite and by seed."""
    wanted = plan(tmp_path, tmp_path, suites=["trace", "long"], methods=["gem", "lora", "joint"], seeds=[0, 1])
    jobs = [(job.method, job.suite, job.seed) for job in wanted.jobs()]
    assert jobs[:4] == [("lora", "trace", 0), ("joint", "trace", 0), ("lora", "trace", 1), ("joint", "trace", 1)]
    assert [method for method, _, _ in jobs[8:]] == ["gem"] * 4
    assert len({job.file for job in wanted.jobs()}) == 12


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"methods": ["lorra"]}, "--method lorra"),
        ({"suites": ["nowhere"]}, "--suite nowhere"),
        ({"suites": ["trace"], "order": ["a"]}, "--order"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    """It is refused before any run; the message names the option."""
    with pytest.raises(UsageError, match=named):
        plan(tmp_path, tmp_path, **changes).check()


def test_a_run_is_made_once(tmp_path: Path, write_tasks: Callable[..., Path]) -> None:
    """A second command finds the result, and leaves a run in progress to the process that makes it."""
    folder, out = write_tasks("fox", "dog"), tmp_path / "runs"
    text = io.StringIO()
    console = Console(file=text)
    (job,) = plan(folder, out).jobs()
    job.file.parent.mkdir(parents=True)
    with job.running.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert carry_out(plan(folder, out), side_by_side=1, console=console) == 0
    assert "is being made by another command" in text.getvalue()
    assert not job.file.exists()
    assert carry_out(plan(folder, out), side_by_side=2, console=console) == 1
    before = job.file.read_bytes()
    assert carry_out(plan(folder, out), side_by_side=1, console=console) == 0
    assert job.file.read_bytes() == before
    assert [path.name for path in job.file.parent.iterdir()] == ["frozen.0.json"]


def test_a_termination_ends_the_runs_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are separate processes and would otherwise go on."""
    started: list[subprocess.Popen[str]] = []

    def start(job: RunJob, threads: int) -> planning._Worker:
        del threads
        started.append(subprocess.Popen(["sleep", "600"], stderr=subprocess.PIPE, text=True))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return planning._Worker(job, started[-1])

    monkeypatch.setattr(planning, "_start", start)
    with pytest.raises(SystemExit) as ended:
        carry_out(plan(tmp_path, tmp_path / "runs"), side_by_side=1, console=Console(file=io.StringIO()))
    assert ended.value.code == 128 + signal.SIGTERM
    assert [each.returncode for each in started] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
