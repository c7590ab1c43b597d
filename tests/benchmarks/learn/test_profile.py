"""Profiles: packaged ones, files, and the backbone that they are for."""

from pathlib import Path

import pytest

from benchmarks.learn.arms import read_arm
from benchmarks.learn.profile import PACKAGED, Profile, read_profile
from streamlearn.errors import UsageError


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_profiles_have_valid_settings(name: str, tmp_path: Path) -> None:
    """For all methods and for every single one."""
    profile = read_profile(name)
    for own in [{}, *profile.methods.values()]:
        read_arm("streamlearn", profile, seed=0, state=tmp_path, stream=tmp_path, own=own)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Its name is the file's."""
    profile = Profile("mine", "a", "chat", 20, {"learner.lr": 0.1}, {"er": {"baseline.size": 3}}, {"seed": 100})
    (tmp_path / "mine.json").write_bytes(profile.to_json())
    assert read_profile(str(tmp_path / "mine.json")) == profile


@pytest.mark.parametrize("text", ["{", '{"unknown": 1}', '{"prompts": "plain"}', "[]"])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    """The message has the option."""
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(UsageError, match=r"--profile .*mine\.json: not a profile"):
        read_profile(str(tmp_path / "mine.json"))
    with pytest.raises(UsageError, match="--profile none: expected a file or one of nano, smollm2"):
        read_profile("none")


def test_a_folder_has_the_profiles_name_unless_that_is_builtin(tmp_path: Path) -> None:
    """Tables show no paths."""
    (tmp_path / "qwen").mkdir()
    assert Profile("n", "builtin:nano").backbone_name(None) == "builtin:nano"
    assert Profile("n", "builtin:nano").backbone_name(tmp_path / "qwen") == "qwen"
    assert Profile("s", "SmolLM2").backbone_name(tmp_path / "qwen") == "SmolLM2"


def test_the_model_is_the_folder_or_builtin(tmp_path: Path) -> None:
    """A profile for a model that is not builtin needs a folder, or names one."""
    assert Profile("n", "builtin:nano").model(None) == "builtin:nano"
    assert Profile("n", "builtin:nano").model(tmp_path) == str(tmp_path)
    assert Profile("t", str(tmp_path)).model(None) == str(tmp_path)
    with pytest.raises(UsageError, match="--backbone: profile s is for SmolLM2"):
        Profile("s", "SmolLM2").model(None)
    with pytest.raises(UsageError, match=r"--backbone .*none: expected the folder of a model"):
        Profile("s", "SmolLM2").model(tmp_path / "none")
