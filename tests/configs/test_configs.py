"""The files that ship: every configuration loads, the sample is licensed, and the reference is generated."""

import gzip
import shutil
from collections import Counter
from pathlib import Path

import orjson
import pytest
from transformers import LlamaConfig

from streamlearn.cli.doctor import check_backbone
from streamlearn.errors import ConfigError
from streamlearn.settings import load

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SAMPLE = ROOT / "configs/sample"
NANO = ROOT / "streamlearn/backbone/nano"


SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Architecture of the backbone that `python -m benchmarks.backbones.smollm2` makes."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_is_complete_and_valid(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads, and its adapter fits its backbone, as far as the backbone is available on this machine."""
    if config.name == "smollm2.yaml":  # the folder must be made first: its architecture stands for it
        LlamaConfig(**SMOLLM2).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").touch()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(NANO / name, tmp_path)
        monkeypatch.setenv("STREAMLEARN_BACKBONE__MODEL", str(tmp_path))
    assert check_backbone(load(config)).startswith("valid")


def test_a_missing_backbone_says_how_to_make_it() -> None:
    """The folder of the SmolLM2 configuration is not bundled."""
    settings = load(ROOT / "configs/smollm2.yaml")
    missing = settings.backbone.model_copy(update={"model": f"{settings.backbone.model}-missing"})
    with pytest.raises(ConfigError, match=r"python -m benchmarks\.backbones\.smollm2 FOLDER"):
        check_backbone(settings.model_copy(update={"backbone": missing}))


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_sample_holds_what_its_readme_says(split: str) -> None:
    """Three tasks with these numbers of records, each with a source and a licence in the README."""
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.splitlines() if line[:1] == "|"]
    counts = {row[0]: int(row[2 if split == "train" else 3]) for row in rows if "_" in row[0]}
    with gzip.open(SAMPLE / f"superni.{split}.jsonl.gz") as lines:
        assert Counter(orjson.loads(line)["meta"]["task"] for line in lines) == counts
    assert len(counts) == 3
    licences = {row[0]: row[2] for row in rows if row[0].removeprefix("task").isdigit()}
    assert {task.partition("_")[0] for task in counts} == set(licences)
    assert all("CC BY 4.0" in licence or "MIT" in licence for licence in licences.values())
