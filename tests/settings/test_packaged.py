"""`packaged:NAME` loads a configuration that ships with the package."""

import shutil
from pathlib import Path

import pytest

from streamlearn.errors import ConfigError
from streamlearn.settings import load, packaged
from streamlearn.settings.packaged import packaged_config, packaged_folder, packaged_name

ROOT = Path(__file__).parents[2]
NAMES = ("image-text", "kafka-local", "prod", "quickstart", "smollm2")


@pytest.fixture
def as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as a wheel lays it out, read-only, and an empty current directory."""
    package = tmp_path / "site-packages/streamlearn"
    for name in ("configs", "systemd"):
        shutil.copytree(ROOT / name, package / "_data" / name)
    monkeypatch.setattr(packaged, "_PACKAGE", package)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return package


@pytest.mark.parametrize("name", NAMES)
def test_a_checkout_has_its_configurations_at_the_root(name: str) -> None:
    """`packaged:NAME` is configs/NAME.yaml."""
    assert packaged_config(name) == ROOT / f"configs/{name}.yaml"


def test_a_wheel_has_them_beside_its_modules(as_installed: Path) -> None:
    """Configurations and systemd files lie under _data."""
    assert packaged_config("quickstart") == as_installed / "_data/configs/quickstart.yaml"
    assert (packaged_folder("systemd") / "streamlearn.service").is_file()


@pytest.mark.parametrize("name", ["quikstart", "", "../configs/quickstart", "sample/README"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    """Only names are accepted, never paths."""
    with pytest.raises(ConfigError, match="image-text, kafka-local, prod, quickstart, smollm2") as caught:
        load(Path(f"packaged:{name}"))
    assert repr(name) in str(caught.value)


def test_an_ordinary_path_is_not_packaged() -> None:
    """Only the prefix counts."""
    assert packaged_name(Path("configs/quickstart.yaml")) is None
    assert packaged_name(Path("packaged:quickstart")) == "quickstart"


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_configuration_loads(name: str, as_installed: Path) -> None:
    """As it does from its file."""
    del as_installed
    there, here = load(Path(f"packaged:{name}")), load(ROOT / f"configs/{name}.yaml")
    assert there.model_copy(update={name: getattr(here, name) for name in ("state", "source", "backbone")}) == here


def test_a_packaged_configuration_finds_its_backbone_under_the_current_directory(as_installed: Path) -> None:
    """Where a checkout has it; a builtin model and a hub id stay as they are."""
    del as_installed
    assert load(Path("packaged:smollm2")).backbone.model == str(Path.cwd() / "build/smollm2")
    assert load(Path("packaged:quickstart")).backbone.model == "builtin:nano"
    assert load(Path("packaged:prod")).backbone.model == "Qwen/Qwen3-8B"


def test_a_packaged_configuration_reads_its_sample_and_writes_to_the_current_directory(as_installed: Path) -> None:
    """The sample ships beside it; `state` is where a checkout of the current directory would have it."""
    settings = load(Path("packaged:quickstart"))
    assert settings.state == Path.cwd() / "build/quickstart"
    assert settings.source.jsonl is not None
    assert settings.source.jsonl.path == as_installed / "_data/configs/sample/superni.train.jsonl.gz"
    assert settings.source.jsonl.path.is_file()


def test_the_quickstart_of_a_checkout_is_the_same_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the root of a checkout, `packaged:quickstart` and `configs/quickstart.yaml` mean the same run."""
    monkeypatch.chdir(ROOT)
    assert load(Path("packaged:quickstart")) == load(Path("configs/quickstart.yaml"))


def test_an_absolute_state_stays_where_it_is(as_installed: Path) -> None:
    """The production configuration's state folder is systemd's."""
    del as_installed
    assert load(Path("packaged:prod")).state == Path("/var/lib/streamlearn")


def test_relative_paths_from_the_environment_start_at_the_current_directory(
    as_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user sees the current directory, not the folder that the package is installed in."""
    del as_installed
    monkeypatch.setenv("STREAMLEARN_STATE", "elsewhere")
    monkeypatch.setenv("STREAMLEARN_SOURCE__JSONL__PATH", "records.jsonl")
    settings = load(Path("packaged:quickstart"))
    assert settings.source.jsonl is not None
    assert (settings.state, settings.source.jsonl.path) == (Path.cwd() / "elsewhere", Path.cwd() / "records.jsonl")
