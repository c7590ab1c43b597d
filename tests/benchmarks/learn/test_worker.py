"""The worker's exit code and files."""

import fcntl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn import worker
from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.methods import Method
from benchmarks.learn.profile import Profile
from benchmarks.learn.suite import Suite


def test_a_run_in_progress_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is BUSY, and the other process's file is kept."""
    job = RunJob("superni-1", "lora", 0, (), 1, 1, str(tmp_path))
    job.running.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["worker", job.to_json()])
    with job.running.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as ended:
            worker.main()
    assert ended.value.code == worker.BUSY
    assert job.running.exists()


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result stays as it is."""
    job = RunJob("superni-1", "lora", 0, (), 1, 1, str(tmp_path))
    job.file.parent.mkdir(parents=True)
    job.file.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["worker", job.to_json()])
    worker.main()
    assert job.file.read_text() == "{}"


def test_a_run_gets_what_its_job_says(
    tmp_path: Path,
    tiny_profile: Profile,
    tiny_profile_file: Path,
    write_tasks: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The suite of the wanted split, the profile, the backbone's folder and the values of a trial."""
    got: dict[str, Any] = {}

    def run_method(suite: Suite, name: str, method: Method, seed: int, **rest: Any) -> dict[str, Any]:
        got.update(rest, suite=suite, name=name, seed=seed)
        return {"method": name}

    monkeypatch.setattr(worker, "run_method", run_method)
    folder = str(write_tasks("fox"))
    conditions = RunConditions((), tmp_path / "out", str(tiny_profile_file), tmp_path, "development", 5, 2)
    job = conditions.job(folder, "heads 2", 3, own={"learner.lr": 0.5})
    monkeypatch.setattr(sys, "argv", ["worker", job.to_json()])
    worker.main()
    assert orjson.loads(job.file.read_bytes()) == {"method": "heads 2"}
    assert [path.name for path in job.file.parent.iterdir()] == [job.file.name]
    assert (got["name"], got["seed"], got["own"]) == ("heads 2", 3, {"learner.lr": 0.5})
    assert (got["profile"], got["backbone_folder"]) == (tiny_profile, tmp_path)
    suite = got["suite"]
    assert (suite.split, len(suite.segments[0].records), len(suite.tests["fox"])) == ("development", 5, 2)
