"""Arms, from text to settings."""

from pathlib import Path

import pytest

from streamlearn.bench.learn.arms import NANO, settings_of
from streamlearn.bench.learn.methods import ABLATIONS, METHODS
from streamlearn.errors import UsageError


def test_an_arm_changes_its_preset(tmp_path: Path) -> None:
    """Changes are read as YAML and override those shared by all arms."""
    shared = {"adapter.rank": 3, "holdout.every_records": 0}
    arm = "mh-moe:adapter.rank=2:learner.router_lr=0"
    settings = settings_of(arm, seed=7, state=tmp_path, stream=tmp_path / "s.jsonl", shared=shared)
    assert (settings.adapter.preset, settings.adapter.rank, settings.learner.router_lr) == ("mh-moe", 2, 0)
    assert (settings.seed, settings.holdout.every_records, settings.learner.lr) == (7, 0, NANO["learner"]["lr"])


@pytest.mark.parametrize("arm", ["mh-moe:rank=2", "mh-moe:adapter.rank"])
def test_a_change_without_section_or_value_is_refused(tmp_path: Path, arm: str) -> None:
    """The message has the change."""
    with pytest.raises(UsageError, match=f"found the change '{arm.partition(':')[2]}'"):
        settings_of(arm, seed=0, state=tmp_path, stream=tmp_path)


@pytest.mark.parametrize("name", [*METHODS, *ABLATIONS])
def test_every_method_has_valid_settings(tmp_path: Path, name: str) -> None:
    """Presets and keys of all arms exist."""
    arm = {**METHODS, **ABLATIONS}[name].arm.format(rank=20, alpha=40.0)
    settings_of(arm, seed=0, state=tmp_path, stream=tmp_path)
