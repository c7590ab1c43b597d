"""`streamlearn check-config` refuses what `run` would refuse, and needs neither network nor GPU."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamlearn.cli.doctor import check_backbone
from streamlearn.cli.main import app
from streamlearn.errors import ConfigError
from streamlearn.settings import Settings
from tests.doubles import tiny_backbone

PINNED = "0123456789abcdef" * 2 + "01234567"


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"source": {"jsonl": {"path": "stream.jsonl"}}, **sections})


def test_an_adapter_that_fits_is_described() -> None:
    """With the parameters that a token activates."""
    assert check_backbone(settings()).startswith("valid; adapter streamlearn fits builtin:nano, ")


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"model": "owner/name"}, r"backbone\.revision: .*40 hex digits.*None"),
        ({"model": "owner/name", "revision": "main"}, r"backbone\.revision: .*40 hex digits.*main"),
        ({"model": "/nowhere/model"}, r"backbone\.model /nowhere/model: no such folder"),
        ({"model": "builtin:nono"}, r"backbone\.model builtin:nono: no such model; builtin models are builtin:nano"),
        ({"device": "gpu"}, r"backbone\.device: expected auto, cpu, cuda or cuda:N, found 'gpu'"),
    ],
)
def test_a_backbone_that_run_refuses_is_refused(backbone: dict[str, str], message: str) -> None:
    """A hub id that is not pinned, a folder that is not there, a name that is unknown."""
    with pytest.raises(ConfigError, match=message) as refused:
        check_backbone(settings(backbone=backbone))
    assert refused.value.exit_code == 78


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"safetensors"):
        check_backbone(settings(backbone={"model": str(tmp_path)}))


def test_an_adapter_that_does_not_fit_a_local_folder_is_refused(tmp_path: Path) -> None:
    folder = tiny_backbone(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter\.num_heads: must divide"):
        check_backbone(settings(backbone={"model": str(folder)}, adapter={"num_heads": 3}))


def test_a_pinned_hub_model_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays valid without network; the message says what was not checked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = settings(backbone={"model": "owner/name", "revision": PINNED, "device": "cuda"})
    assert check_backbone(model) == ("valid; backbone owner/name would be fetched on first start, adapter not checked")
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize("backbone", [{}, {"model": "owner/name", "revision": PINNED}])
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"holdout": {"every_records": 0}, "publish": {}}, r"found holdout\.every_records 0"),
        ({"publish": {"min_holdout_records": 10}, "holdout": {"records_per_regime": 5}}, "min_holdout_records must be"),
        ({"publish": {"vllm": {"replicas": ["http://[::1]:1"], "token_file": "/nowhere/key"}}}, "/nowhere/key: the"),
        ({"track": {"mlflow": {"uri": "http://[::1]:1", "token_file": "/nowhere/key"}}}, r"track\.mlflow\.token_file"),
    ],
)
def test_what_cannot_be_published_or_tracked_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backbone: dict[str, str],
    sections: dict[str, dict[str, Any]],
    message: str,
) -> None:
    """As a start does; also where the backbone is not on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if "publish" in sections:
        sections = {**sections, "publish": {"folder": tmp_path / "published", **sections["publish"]}}
    with pytest.raises(ConfigError, match=message):
        check_backbone(settings(backbone=backbone, **sections))


def test_the_published_folder_is_for_doctor_to_check(tmp_path: Path) -> None:
    """It need not be on the machine that checks a configuration, and is not created."""
    assert check_backbone(settings(publish={"folder": tmp_path / "published"})).startswith("valid; ")
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_78(tmp_path: Path) -> None:
    """With what is wrong."""
    config = tmp_path / "config.yaml"
    config.write_text("source: {jsonl: {path: a.jsonl}}\nholdout: {every_records: 0}\npublish: {folder: published}\n")
    result = CliRunner().invoke(app, ["check-config", "--config", str(config)])
    assert isinstance(result.exception, ConfigError)
    assert "the gate needs hold-out records" in str(result.exception)
