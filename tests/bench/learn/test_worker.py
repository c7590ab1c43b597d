"""The worker's exit code and files."""

import fcntl
import sys
from pathlib import Path

import pytest

from streamlearn.bench.learn import worker
from streamlearn.bench.learn.job import RunJob


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
