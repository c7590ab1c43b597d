"""A run's argument and files."""

from pathlib import Path

from streamlearn.bench.learn.job import RunJob


def test_a_job_survives_its_command_line() -> None:
    """JSON turns tuples into lists; `from_json` restores them."""
    job = RunJob("superni-1", "lora", 3, ("a", "b"), 16, 8, "out", order=("x",), generate=False)
    assert RunJob.from_json(job.to_json()) == job


def test_a_result_is_named_after_suite_method_and_seed(tmp_path: Path) -> None:
    """Spaces and commas of an ablation do not appear in the file name; a folder's suite has the folder's name."""
    job = RunJob(str(tmp_path / "mine"), "lora, a third of the learning rate", 1, (), 1, 1, str(tmp_path))
    assert job.file == tmp_path / "mine/lora-a-third-of-the-learning-rate.1.json"
    assert job.running == job.file.with_suffix(".running")
