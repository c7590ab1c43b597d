"""Schedule, batches and checkpoints of the nano backbone's pretraining."""

import gzip
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from streamlearn.backbone.pretrain import (
    IGNORED,
    PretrainRecipe,
    batches,
    learning_rate,
    nano_config,
    pad,
    pretrain,
    read_texts,
)

RECIPE = PretrainRecipe(steps=2, held_out=2)


def test_the_learning_rate_warms_up_and_decays_to_a_twentieth() -> None:
    """The peak is reached at the end of the warm-up."""
    recipe = PretrainRecipe()
    assert learning_rate(0, recipe) == pytest.approx(recipe.peak_lr / recipe.warmup_steps)
    assert learning_rate(recipe.warmup_steps, recipe) == pytest.approx(recipe.peak_lr)
    assert learning_rate(recipe.steps, recipe) == pytest.approx(0.05 * recipe.peak_lr)


def test_every_piece_is_in_one_batch_of_an_epoch() -> None:
    """Batches stay within the tokens per step, padding included; the seed determines their order."""
    pieces = [[number] * (1 + number % 40) for number in range(1, 200)]
    recipe = replace(RECIPE, tokens_per_step=128)
    taken: list[int] = []
    for batch in batches(pieces, recipe):
        assert batch.numel() <= 128 + 16 * len(batch)  # lengths are equal up to 16
        taken += batch[:, 0].tolist()
        if len(taken) == len(pieces):
            break
    assert sorted(taken) == list(range(1, 200))
    again = torch.cat([batch[:, 0] for batch in islice(batches(pieces, recipe), 3)]).tolist()
    assert again == taken[: len(again)]


def test_padding_is_ignored() -> None:
    """It is on the right."""
    assert pad([[1, 2, 3], [4]]).tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    """The message has the option and the folder."""
    with pytest.raises(SystemExit, match=f"--data: expected a folder .* in {tmp_path}"):
        read_texts(tmp_path)


def test_a_run_writes_model_and_figures(tmp_path: Path) -> None:
    """Two steps on a few texts, started twice with the same result."""
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": f"the quick brown fox number {i} runs"}) for i in range(12)]
    (data / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    losses = []
    for name in ("one", "two"):
        pretrain(data, tmp_path / name, RECIPE, bf16=False)
        losses.append(json.loads((tmp_path / name / "pretrain.json").read_text())["held_out_loss"])
    assert losses[0] == losses[1]
    assert (tmp_path / "one/model.safetensors").exists()
    assert nano_config().vocab_size == 4096
