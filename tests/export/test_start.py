"""`adapter.start`: every regime begins from a LoRA of stock PEFT, and what leaves for stock PEFT has both."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamlearn import Learner
from streamlearn.backbone.lora import WEIGHTS
from streamlearn.cli.doctor import check_backbone
from streamlearn.errors import ConfigError, SnapshotMismatchError
from streamlearn.export.formats import BaseModel, write_peft
from streamlearn.export.lora import plain_lora
from streamlearn.publish.folder import PublicationFiles
from streamlearn.settings.settings import load
from tests.backbone.test_lora import FORMS, edit, save_lora
from tests.export.test_export import stock_logits
from tests.publish.test_folder import version

OPTIONS: dict[str, Any] = {
    "stream": {"max_tokens": 32, "batch_tokens": 128, "batch_records": 4},
    "backbone": {"dtype": "float32"},
    "adapter": {"num_heads": 4},
    "learner": {"lr": 1e-2},
    "progress": False,
}
TOKENS = {"0": torch.tensor([5, 90, 17, 40, 33, 70, 12, 51])}
ROWS = [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(24)]


@pytest.fixture
def make(tiny: Path) -> Iterator[Callable[..., Learner]]:
    """A learner on the tiny backbone; it is closed after the test."""
    made: list[Learner] = []

    def build(model: Any = tiny, **changes: Any) -> Learner:
        made.append(Learner(model, **{**OPTIONS, **changes}))
        return made[-1]

    yield build
    for learner in made:
        learner.close()


@torch.no_grad()
def logits(learner: Learner) -> dict[str, Tensor]:
    """Under PEFT's active adapter, that of the first regime."""
    return {name: learner.peft_model(input_ids=ids[None]).logits[0] for name, ids in TOKENS.items()}


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_before_the_first_record_it_computes_what_stock_peft_computes(
    make: Callable[..., Learner], tiny: Path, tmp_path: Path, form: str
) -> None:
    start = save_lora(tiny, tmp_path / "start", **FORMS[form])
    (expected,) = stock_logits(tiny, [start], TOKENS, tmp_path)
    assert_same(expected, logits(make(start=start)))
    with pytest.raises(AssertionError):
        assert_same(expected, logits(make()))


def test_a_model_that_is_loaded_already_begins_from_it_too(
    make: Callable[..., Learner], tiny: Path, tmp_path: Path
) -> None:
    start = save_lora(tiny, tmp_path / "start")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert_same(logits(make(start=start)), logits(make(model, tokenizer=tokenizer, start=start)))


def test_an_export_is_the_sum_of_the_start_and_of_what_the_regime_learned(
    make: Callable[..., Learner], tiny: Path, tmp_path: Path
) -> None:
    """For stock PEFT both are one LoRA of the backbone; its card says so."""
    start = save_lora(tiny, tmp_path / "start", **FORMS["patterns"])
    learner = make(start=start, state=tmp_path / "state", holdout={"every_records": 5})
    list(learner.learn(ROWS))
    (exported,) = learner.export(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    parts = learner._components.learner
    write_peft(own, plain_lora(parts.weights("regime0"), parts.model.peft_config["regime0"]), BaseModel("b", None))
    found, *others = stock_logits(tiny, [exported, start, own], TOKENS, tmp_path)
    assert_same(logits(learner), found)
    assert not any(torch.allclose(other["0"], found["0"], atol=1e-2) for other in others)
    saved = learner.save() / "adapter" / "regime0"
    (in_snapshot,) = stock_logits(tiny, [saved], TOKENS, tmp_path)
    assert_same(in_snapshot, found)
    (both,) = stock_logits(tiny, [start], TOKENS, tmp_path, beside=own)
    assert_same(both, found)
    card = (exported / "README.md").read_text()
    assert "| begins from | LoRA start, which is part of it |" in card
    assert "| LoRA | rank 19, " in card  # 3 of the start, 4 heads of 4


def test_a_published_version_is_read_back_without_the_start(
    make: Callable[..., Learner], tiny: Path, tmp_path: Path
) -> None:
    """The gate compares it beside a backbone that has the start already."""
    learner = make(start=save_lora(tiny, tmp_path / "start"))
    list(learner.learn(ROWS))
    parts = learner._components.learner
    own = plain_lora(parts.weights("regime0"), parts.model.peft_config["regime0"])
    base = BaseModel.from_settings(learner.settings.backbone, learner._components.shape)
    folder = PublicationFiles(tmp_path / "published", base)
    folder.write_version(version("s-regime-1@5"), own, "a card")
    read = folder.lora("s-regime-1@5")
    assert (read.rank, read.alpha, read.layers.keys()) == (own.rank, own.alpha, own.layers.keys())
    assert all(torch.equal(read.layers[name].B_ON, pair.B_ON) for name, pair in own.layers.items())
    (found,) = stock_logits(tiny, [folder.path("s-regime-1@5")], TOKENS, tmp_path)
    assert_same(logits(learner), found)


def test_a_run_continues_from_the_same_start_only(make: Callable[..., Learner], tiny: Path, tmp_path: Path) -> None:
    """Its files may lie in another folder."""
    start, state = save_lora(tiny, tmp_path / "start"), tmp_path / "state"
    learner = make(start=start, state=state)
    list(learner.learn(ROWS))
    expected = logits(learner)
    learner.close()
    with Learner.open(state) as opened:
        assert_same(expected, logits(opened))
    moved = Path(shutil.move(start, tmp_path / "moved"))
    again = make(start=moved, state=state)
    assert_same(expected, logits(again))
    again.close()
    other = save_lora(tiny, tmp_path / "other", seed=1)
    with pytest.raises(SnapshotMismatchError, match=r"began from another LoRA: adapter\.start is .*/other.*/start"):
        make(start=other, state=state)
    with pytest.raises(SnapshotMismatchError, match=r"began from another LoRA: adapter\.start is absent here"):
        make(state=state)
    edit(moved, {"lora_alpha": 6})
    with pytest.raises(SnapshotMismatchError, match=r"adapter\.start_digest is"):
        make(start=moved, state=state)


def test_a_configuration_names_it_relative_to_itself(tiny: Path, tmp_path: Path) -> None:
    """And `check-config` finds what does not fit, without weights of the backbone."""
    save_lora(tiny, tmp_path / "start")
    file = tmp_path / "run.yaml"
    source, adapter = "{jsonl: {path: x.jsonl}}", "{num_heads: 4, start: ./start}"
    file.write_text(f"{{source: {source}, backbone: {{model: {tiny}}}, adapter: {adapter}}}")
    settings = load(file)
    assert settings.adapter.start == str(tmp_path / "start")
    assert check_backbone(settings).startswith("valid; adapter streamlearn fits")
    (tmp_path / "start" / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=f"found no {WEIGHTS}"):
        check_backbone(settings)
    pinned = settings.model_copy(
        update={"adapter": settings.adapter.model_copy(update={"start": "owner/lora", "start_revision": "0" * 40})}
    )
    assert check_backbone(pinned) == "valid; adapter owner/lora would be fetched on first start, adapter not checked"
