"""A run's argument, files and conditions."""

from pathlib import Path

from benchmarks.learn.job import RunConditions, RunJob


def test_a_job_survives_its_command_line() -> None:
    """JSON turns tuples into lists; `from_json` restores them."""
    own = {"learner.lr": 0.5, "adapter.target_modules": ["up_proj"]}
    job = RunJob("superni-1", "lora", 3, ("a", "b"), 16, 8, "out", order=("x",), split="development", own=own)
    assert RunJob.from_json(job.to_json()) == job


def test_a_result_is_named_after_suite_method_and_seed(tmp_path: Path) -> None:
    """Spaces and commas of an ablation do not appear in the file name; a folder's suite has the folder's name."""
    job = RunJob(str(tmp_path / "mine"), "lora, a third of the learning rate", 1, (), 1, 1, str(tmp_path))
    assert job.file == tmp_path / "mine/lora-a-third-of-the-learning-rate.1.json"
    assert job.running == job.file.with_suffix(".running")
    assert job.error == job.file.with_suffix(".error")


def test_a_trial_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """So that no other run is taken for it."""
    job = RunJob("trace", "lora", 100, (), 1, 1, str(tmp_path), label="plain/learner.lr=0.001")
    assert job.file == tmp_path / "plain/learner.lr=0.001/trace/lora.100.json"
    assert job.title == "trace  lora  seed 100  plain/learner.lr=0.001"


def test_a_job_takes_what_its_conditions_leave_open_from_the_profile(tmp_path: Path, tiny_profile_file: Path) -> None:
    """Paths are absolute: a worker may have another working folder."""
    conditions = RunConditions((Path("tasks"),), tmp_path, str(tiny_profile_file), backbone=tmp_path)
    job = conditions.job("trace", "lora", 0)
    assert (job.records, job.evaluated, job.split) == (24, 50, "test")
    assert (job.folders, job.backbone) == ((str(Path.cwd() / "tasks"),), str(tmp_path))
    assert RunConditions((), tmp_path, records=7).job("trace", "lora", 0).records == 7
